"""The public names and the module each lives in, for type checkers and at run time."""

from opendata_buffer.commit.durability import (
    DurabilityWatcher as DurabilityWatcher,
)
from opendata_buffer.commit.durability import (
    Durable as Durable,
)
from opendata_buffer.commit.durability import (
    WriteHandle as WriteHandle,
)
from opendata_buffer.config import (
    ConsumerConfig as ConsumerConfig,
)
from opendata_buffer.config import (
    GarbageCollectorConfig as GarbageCollectorConfig,
)
from opendata_buffer.config import (
    ProducerConfig as ProducerConfig,
)
from opendata_buffer.config import (
    QueueConfig as QueueConfig,
)
from opendata_buffer.config import (
    StoreOptions as StoreOptions,
)
from opendata_buffer.config import (
    WorkerConfig as WorkerConfig,
)
from opendata_buffer.consumer.batches import ArrowBatch as ArrowBatch
from opendata_buffer.consumer.batches import ConsumedBatch as ConsumedBatch
from opendata_buffer.consumer.batches import RawBatch as RawBatch
from opendata_buffer.consumer.consumer import (
    Consumer as Consumer,
)
from opendata_buffer.consumer.descriptors import BatchDescriptor as BatchDescriptor
from opendata_buffer.consumer.fetch import (
    FetchHandle as FetchHandle,
)
from opendata_buffer.consumer.position import (
    Position as Position,
)
from opendata_buffer.consumer.read_ahead import (
    fetch_many as fetch_many,
)
from opendata_buffer.consumer.transactions import (
    TransactionFilter as TransactionFilter,
)
from opendata_buffer.errors import (
    BatchMissing as BatchMissing,
)
from opendata_buffer.errors import (
    BatchUnreadable as BatchUnreadable,
)
from opendata_buffer.errors import (
    ClaimLost as ClaimLost,
)
from opendata_buffer.errors import (
    Closed as Closed,
)
from opendata_buffer.errors import (
    CommitStateUnknown as CommitStateUnknown,
)
from opendata_buffer.errors import (
    Conflict as Conflict,
)
from opendata_buffer.errors import (
    CorruptBatch as CorruptBatch,
)
from opendata_buffer.errors import (
    CorruptData as CorruptData,
)
from opendata_buffer.errors import (
    CorruptManifest as CorruptManifest,
)
from opendata_buffer.errors import (
    DataLoss as DataLoss,
)
from opendata_buffer.errors import (
    Drained as Drained,
)
from opendata_buffer.errors import (
    Fenced as Fenced,
)
from opendata_buffer.errors import (
    FlushFailed as FlushFailed,
)
from opendata_buffer.errors import (
    ForeignLocation as ForeignLocation,
)
from opendata_buffer.errors import (
    InvalidInput as InvalidInput,
)
from opendata_buffer.errors import (
    MalformedRecord as MalformedRecord,
)
from opendata_buffer.errors import (
    ObjectNotFound as ObjectNotFound,
)
from opendata_buffer.errors import (
    OpenDataBufferError as OpenDataBufferError,
)
from opendata_buffer.errors import (
    PermanentStorageError as PermanentStorageError,
)
from opendata_buffer.errors import (
    PoisonBatch as PoisonBatch,
)
from opendata_buffer.errors import (
    PrefixConflict as PrefixConflict,
)
from opendata_buffer.errors import (
    QueueFull as QueueFull,
)
from opendata_buffer.errors import (
    QueueReset as QueueReset,
)
from opendata_buffer.errors import (
    StorageError as StorageError,
)
from opendata_buffer.errors import (
    Superseded as Superseded,
)
from opendata_buffer.errors import (
    TransientStorageError as TransientStorageError,
)
from opendata_buffer.errors import (
    UnsafeStore as UnsafeStore,
)
from opendata_buffer.formats.batch import (
    Compression as Compression,
)
from opendata_buffer.formats.keys import (
    Transaction as Transaction,
)
from opendata_buffer.formats.manifest import (
    Metadata as Metadata,
)
from opendata_buffer.gc.collector import (
    GarbageCollector as GarbageCollector,
)
from opendata_buffer.gc.collector import (
    GcReport as GcReport,
)
from opendata_buffer.gc.decision import (
    GcPlan as GcPlan,
)
from opendata_buffer.producer.producer import (
    Producer as Producer,
)
from opendata_buffer.stores.factory import (
    open_store as open_store,
)
from opendata_buffer.topic.batch import (
    TopicArrowBatch as TopicArrowBatch,
)
from opendata_buffer.topic.batch import (
    TopicBatch as TopicBatch,
)
from opendata_buffer.topic.consumer import (
    TopicConsumer as TopicConsumer,
)
from opendata_buffer.topic.description import (
    Partition as Partition,
)
from opendata_buffer.topic.description import (
    TopicDescription as TopicDescription,
)
from opendata_buffer.topic.handle import (
    TopicHandle as TopicHandle,
)
from opendata_buffer.topic.handle import (
    TopicWatcher as TopicWatcher,
)
from opendata_buffer.topic.intents import (
    AckIntents as AckIntents,
)
from opendata_buffer.topic.position import (
    PartitionPosition as PartitionPosition,
)
from opendata_buffer.topic.producer import (
    TopicProducer as TopicProducer,
)
from opendata_buffer.topic.publisher import (
    Publisher as Publisher,
)
from opendata_buffer.topic.topic import (
    Topic as Topic,
)
from opendata_buffer.values import (
    ValueOptions as ValueOptions,
)
from opendata_buffer.worker.worker import (
    ClaimedBatch as ClaimedBatch,
)
from opendata_buffer.worker.worker import (
    Worker as Worker,
)
