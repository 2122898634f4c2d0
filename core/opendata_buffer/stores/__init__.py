"""Object stores: memory, a local directory, S3, Google Cloud Storage and Azure."""
