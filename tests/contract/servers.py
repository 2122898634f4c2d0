"""Stores on the real servers that ./run servers installs."""

from __future__ import annotations

from opendata_buffer.config import StoreOptions
from opendata_buffer.stores.azure import AzureStore
from opendata_buffer.stores.base import Store
from opendata_buffer.stores.gcs import GcsStore
from opendata_buffer.stores.s3 import S3Store

REAL = ["versitygw", "fake-gcs-server", "azurite"]


def store_at(server: str, url: str, root: str) -> Store:
    """Open a store on the server with this name, which listens at ``url``."""
    if server == "versitygw":
        return S3Store("bucket", root, StoreOptions(endpoint_url=url))
    if server == "azurite":
        return AzureStore("container", root, StoreOptions(endpoint_url=f"{url}/testing"))
    return GcsStore("bucket", root, StoreOptions(endpoint_url=url))
