from opendata_buffer.consumer.batches import ArrowBatch as ArrowBatch
from opendata_buffer.consumer.batches import ConsumedBatch as ConsumedBatch
from opendata_buffer.consumer.batches import RawBatch as RawBatch
from opendata_buffer.consumer.consumer import Consumer as Consumer
from opendata_buffer.consumer.descriptors import BatchDescriptor as BatchDescriptor
from opendata_buffer.consumer.fetch import FetchHandle as FetchHandle
from opendata_buffer.consumer.read_ahead import fetch_many as fetch_many
from opendata_buffer.consumer.transactions import TransactionFilter as TransactionFilter
