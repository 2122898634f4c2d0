"""Records for the readers of typed values, and what Spark makes of them."""
