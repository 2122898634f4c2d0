"""Names of other libraries, and what to use here instead.

People who come from Kafka, SQS, Pub/Sub, Redis or ``queue.Queue`` type the names that they know.
A wrong name must not end in an error that only repeats it. The tables here say what to use, and
three functions put that into an error:

* :func:`unknown_setting` for a keyword of a constructor, such as ``linger_ms``,
* :func:`unknown_argument` for a keyword of ``produce()``, such as ``headers``,
* :class:`FamiliarNames` for a method or attribute, such as ``consumer.poll``. Python looks for
  ``__getattr__`` only after it has found no attribute, so a right name costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from opendata_buffer.errors import InvalidInput
from opendata_buffer.hints import Setting


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """Return a table from rows of several names, divided by spaces, and their common advice."""
    return {name: advice for names, advice in rows for name in names.split()}


_URL = "the first argument names the queue, such as 's3://bucket/orders'"
_CLOUD = "credentials come from the cloud's standard chain, or from store_options=StoreOptions(...)"
_OWNER = "leave it out: a consumer owns its queue until another one starts"

SETTINGS = _table(
    ("bootstrap_servers brokers hosts url queue queue_url queue_name topic topics path", _URL),
    ("stream subscription project bucket", _URL),
    ("group_id group groupid group_name consumer_group consumer_group_id consumer_name", "reader"),
    ("linger_ms linger flush_interval max_latency batch_timeout", "flush_interval_ms"),
    ("batch_size max_batch_size batch_bytes batch_num_messages", "flush_size_bytes"),
    ("buffer_memory max_buffer_size queue_buffering_max_kbytes maxsize", "max_buffered_bytes"),
    ("compression_type compress codec", "compression"),
    ("acks required_acks enable_idempotence", "leave it out: records are stored and committed "
     "before their handle is done"),
    ("retries retry max_retries", "leave it out: writes are repeated for delivery_timeout_ms"),
    ("message_timeout_ms delivery_timeout", "delivery_timeout_ms"),
    ("request_timeout_ms timeout timeout_s api_version_auto_timeout_ms",
     "use store_options=StoreOptions(timeout_ms=...)"),
    ("transactional_id", "use Publisher(url, name)"),
    ("key_serializer value_serializer serializer",
     "encode records yourself: produce([json.dumps(value).encode()])"),
    ("key_deserializer value_deserializer deserializer",
     "decode records yourself: json.loads(record.value)"),
    ("partitioner key", "give it to the calls of a TopicProducer: produce(records, keys=...)"),
    ("max_poll_records max_messages prefetch prefetch_count max_number_of_messages",
     "a batch comes with all its records; next_descriptors(max) limits the number of batches"),
    ("enable_auto_commit auto_commit auto_ack no_ack", "leave it out: call batch.ack()"),
    ("auto_commit_interval_ms", "ack_interval"),
    ("auto_offset_reset offset from_beginning start_offset startingOffsets starting_position "
     "start_position start_at start_from from_ begin position since seek_to",
     "use start='earliest', 'latest', a sequence or a time, or after=position"),
    ("isolation_level", "use isolation"),
    ("max_poll_interval_ms session_timeout_ms heartbeat_interval_ms", "claim_timeout_ms"),
    ("visibility_timeout ack_deadline ack_deadline_seconds lease_ms", "claim_timeout_ms"),
    ("max_receive_count max_delivery_attempts max_attempts max_retries_per_batch",
     "max_deliveries"),
    ("concurrency threads max_workers num_workers workers",
     "make one worker for each thread or process; they share the queue"),
    ("client_id client_name worker_name", "name"),
    ("create auto_create create_queue", "create_if_missing"),
    ("prefix", "data_path_prefix"),
    ("fetch_min_bytes fetch_max_bytes fetch_max_wait_ms max_partition_fetch_bytes "
     "consumer_timeout_ms", "leave it out; next_batch(timeout=5) waits up to five seconds"),
    ("security_protocol sasl_mechanism sasl_plain_username sasl_plain_password ssl_cafile "
     "ssl_context credentials session aws_profile", _CLOUD),
    ("storage_options", "use store_options=StoreOptions(...)"),
    ("endpoint", "use store_options=StoreOptions(endpoint_url=...)"),
    ("region_name aws_region", "use store_options=StoreOptions(region=...)"),
    ("profile_name", "use store_options=StoreOptions(profile=...)"),
    ("aws_access_key_id", "use store_options=StoreOptions(access_key_id=...)"),
    ("aws_secret_access_key", "use store_options=StoreOptions(secret_access_key=...)"),
    ("aws_session_token", "use store_options=StoreOptions(session_token=...)"),
    ("on_delivery callback dr_cb", "give it to the calls: produce(records, on_delivery=...)"),
    ("loop", "leave it out: await the handle, or produce_async()"),
    ("schema_registry value_schema schema", "records are bytes: encode and decode them yourself"),
)  # fmt: skip
"""Settings. An advice that is one name is a setting of some class."""

_OWNERS = {
    "reader": "a consumer",
    "ack_interval": "a consumer",
    "create_if_missing": "a consumer",
    "claim_timeout_ms": "a Worker",
    "max_deliveries": "a Worker",
    "name": "a Worker",
}
"""The class that has a setting, where the setting is not one of all classes."""

_LIST = "pass the records as a list of bytes: produce([value])"

ARGUMENTS = _table(
    ("value values data Data body MessageBody payload payloads msg messages record item items",
     _LIST),
    ("headers attributes MessageAttributes properties",
     "use metadata, bytes that belong to all records of the call"),
    ("callback on_done", "use on_delivery, a function of (error, durable)"),
    ("topic queue QueueUrl stream StreamName", "the producer's URL names the queue or topic"),
    ("timestamp timestamp_ms", "leave it out: the producer records the time of the call"),
    ("timeout timeout_ms", "use produce(records).result(timeout=5)"),
    ("key ordering_key PartitionKey partition_key MessageGroupId routing_key",
     "use key=, one key for all records of the call, or keys=, one for each; a TopicProducer has "
     "them, a queue has no keys"),
    ("keys partition partitioner", "only a TopicProducer has it; a queue has no partitions"),
    ("delay DelaySeconds", "leave it out: records are delivered in the order of the queue"),
)  # fmt: skip
"""Keywords of ``produce()``."""


def unknown_setting(
    name: str, names: Collection[str], store_options: Collection[str] = ()
) -> InvalidInput:
    """Make the error about a setting that does not exist.

    Args:
        name: The name that was given.
        names: The settings that exist.
        store_options: The settings of :class:`.StoreOptions`.

    Returns:
        The error. It names what to use, or the nearest setting.
    """
    if name in store_options:
        fix = f"use store_options=StoreOptions({name}=...)"
    elif (advice := SETTINGS.get(name)) is None:
        import difflib  # only where a name is wrong

        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        fix = f"did you mean {near[0]!r}?" if near else f"use {', '.join(names)}"
        if near:
            return InvalidInput(f"unknown setting {name!r}; {fix} Settings: {', '.join(names)}")
    elif not advice.isidentifier():
        fix = advice
    elif advice in names:
        return InvalidInput(f"unknown setting {name!r}: use ", Setting(advice))
    elif advice in _OWNERS:
        fix = f"use {advice} of {_OWNERS[advice]}; here, leave it out"
    else:
        fix = f"use {advice} of a producer; here, leave it out"
    return InvalidInput(f"unknown setting {name!r}: {fix}")


def unknown_argument(
    call: str, name: str, others: str = "use records, metadata and on_delivery"
) -> InvalidInput:
    """Make the error about a keyword that a call does not have.

    Args:
        call: The name of the method.
        name: The keyword that was given.
        others: What to say about a name that is in no table.

    Returns:
        The error. It names what to use.
    """
    fix = ARGUMENTS.get(name, others)
    return InvalidInput(f"{call}() has no argument {name!r}: {fix}")


class FamiliarNames:
    """A class whose objects know the names that other libraries use for their methods."""

    __slots__ = ()

    _instead: ClassVar[Mapping[str, str]] = {}
    """What to use in place of a name."""

    if not TYPE_CHECKING:  # For a type checker, a class with this method has every attribute.

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, self._instead)


def missing_attribute(owner: object, name: str, instead: Mapping[str, str]) -> AttributeError:
    """Make the error about an attribute that an object does not have.

    Args:
        owner: The object.
        name: The name that was asked for.
        instead: What to use in place of a name.

    Returns:
        The error, to be raised by ``__getattr__``.
    """
    kind = type(owner)
    plain = name.removesuffix("_async")
    advice = instead.get(name)
    if advice is None and plain != name and not name.startswith("_"):
        if callable(getattr(kind, plain, None)):
            advice = f"use await asyncio.to_thread({plain})"
        else:
            advice = instead.get(plain)
    text = f"{kind.__name__!r} object has no attribute {name!r}"
    if advice is not None:
        text += f": {advice}"
    return AttributeError(text, name=name, obj=owner)


_NEXT = "use next_batch(timeout=1.0), or 'for batch in consumer'"
_ACK = "use batch.ack(), or await batch.ack_async()"
_MADE = "leave it out: it starts when it is made, and 'with' or close() ends it"
_TOPIC = "use Topic.open(url).read(), which lists the partitions"
_NOT_ACKED = (
    "leave it out: a batch that is not acknowledged is delivered to the next consumer. A Worker's "
    "batch has release() and reject()"
)

OF_CONSUMERS = _table(
    ("poll consume getone getmany get get_nowait receive receive_message receive_messages pull "
     "recv read read_batch fetch fetch_one fetchmany xread xreadgroup next_message", _NEXT),
    ("commit commitSync store_offsets task_done acknowledge xack delete delete_message "
     "delete_messages mark_done", _ACK),
    ("nack reject requeue abandon", _NOT_ACKED),
    ("subscribe unsubscribe assign unassign subscription assignment",
     "a consumer reads the queue of its URL, Consumer('s3://bucket/orders'); with callbacks: for "
     "batch in consumer. TopicConsumer(url, partitions=[0]) reads some partitions"),
    ("pause resume", "stop calling next_batch(): nothing is fetched between two calls"),
    ("committed", "use position, which is after all acknowledged batches"),
    ("seek_to_beginning seek_to_end seek_to_timestamp offsets_for_times rewind replay",
     "use seek('earliest'), seek('latest') or seek(datetime(...)) for the reader of a log"),
    ("get_watermark_offsets beginning_offsets end_offsets highwater",
     "use first_sequence and next_sequence, or lag()"),
    ("qsize empty size count pending xlen backlog",
     "use lag(), or len(consumer), the number of batches that are not acknowledged"),
    ("list_topics topics partitions_for_topic list_partitions", _TOPIC),
    ("start run open connect", _MADE),
    ("stop unsubscribe leave shutdown join disconnect", "use close()"),
    ("metrics", "use OpenTelemetry, or opendata_buffer.admin.describe(url)"),
    ("messages records batches stream", _NEXT),
)  # fmt: skip

_PRODUCE = "use produce([record]), or send(record)"
_PUBLISHER = "use a Publisher: with Publisher(url, name).transaction() as txn"

OF_PRODUCERS = _table(
    ("send_and_wait put_and_wait", "use produce([record]).result(), or await produce([record])"),
    ("put put_nowait publish write writelines append add push enqueue insert put_record "
     "put_records send_message send_messages send_batch send_message_batch xadd basic_publish "
     "produce_many produce_batch send_many lpush rpush emit submit", _PRODUCE),
    ("poll", "leave it out: a thread of the producer calls on_delivery"),
    ("init_transactions begin_transaction commit_transaction abort_transaction transaction begin "
     "send_offsets_to_transaction", _PUBLISHER),
    ("commit sync", "use flush(), or the result() of a handle"),
    ("list_topics partitions_for topics partitions list_partitions", _TOPIC),
    ("purge cancel", "use close(timeout=0), which gives up what is not durable"),
    ("start run open connect", _MADE),
    ("stop shutdown terminate disconnect", "use close()"),
    ("join wait", "use flush()"),
    ("qsize pending size", "use buffered_bytes"),
    ("metrics", "use OpenTelemetry, or opendata_buffer.admin.describe(url)"),
)  # fmt: skip

OF_PUBLISHERS = OF_PRODUCERS | _table(
    ("produce publish send", "use 'with publisher.transaction() as txn: txn.produce(records)', or "
     "publish_committed(records)"),
    ("begin_transaction init_transactions begin", "use 'with publisher.transaction() as txn'"),
    ("commit_transaction", "use commit(), or the end of 'with publisher.transaction()'"),
    ("abort_transaction rollback roll_back",
     "use abort(), or raise in 'with publisher.transaction()'"),
    ("send_offsets_to_transaction ack", "use txn.ack(batch)"),
    ("flush", "use the handles of the calls, or commit()"),
)  # fmt: skip

OF_WORKERS = _table(
    ("poll consume getone getmany get get_nowait receive receive_message receive_messages pull "
     "recv read next_batch fetch lease reserve",
     "use claim(timeout=1.0), or 'for batch in worker'"),
    ("commit ack done delete_message delete task_done acknowledge xack nack reject release requeue",
     "use the methods of a batch: ack(), release() and reject()"),
    ("subscribe run start work", "use 'for batch in worker'"),
    ("stop shutdown join", "use close()"),
    ("qsize empty size lag pending", "use opendata_buffer.admin.describe(url)"),
)  # fmt: skip

OF_BATCHES = _table(
    ("commit acknowledge delete task_done complete", "use ack()"),
    ("nack requeue abandon retry", _NOT_ACKED),
    ("release reject", _NOT_ACKED),
    ("error", "leave it out: next_batch() raises errors"),
    ("value data body payload message messages items", "use values, a list of all records, or "
     "'for record in batch: record.value'"),
    ("key keys", "records have no key: put it into the value or into metadata"),
    ("headers attributes properties", "use metadata, or the metadata of each record"),
    ("topic queue", "use partition, or location"),
    ("offset id message_id index", "use sequence"),
    ("timestamp ingestion_time time", "use the ingestion_time_ms of each record"),
    ("size count num_records", "use len(batch) for records, nbytes for bytes"),
    ("to_pandas to_pylist to_dicts to_arrow to_table to_batch",
     "use as_arrow().to_table(), and .to_pandas() of that, or read with next_arrow_batch()"),
    ("json loads decode", "decode each record: json.loads(record.value)"),
    ("modify_ack_deadline change_visibility extend heartbeat touch renew",
     "leave it out: a Worker's heartbeats renew its claims"),
)  # fmt: skip

OF_CLAIMED_BATCHES = OF_BATCHES | _table(
    ("nack requeue abandon retry change_visibility", "use release(delay=5)"),
    ("dead_letter fail", "use reject(reason)"),
    ("delivery_attempt receive_count attempts", "use delivery_count"),
)

OF_RECORDS = _table(
    ("key", "records have no key: put it into the value or into metadata"),
    ("headers attributes properties", "use metadata"),
    ("data body payload message content", "use value"),
    ("offset id message_id partition topic", "use batch.sequence and batch.partition"),
    ("timestamp time publish_time ingestion_time", "use ingestion_time_ms"),
    ("ack nack commit", "acknowledge the batch: batch.ack()"),
    ("decode json loads", "use value, bytes: record.value.decode(), json.loads(record.value)"),
    ("error", "leave it out: next_batch() raises errors"),
)

OF_HANDLES = _table(
    # The RFC's names, which 0.1 had, too: watcher, await_durable.
    ("get wait join value watcher await_durable", "use result(timeout=5), or await the handle"),
    ("is_set", "use done()"),
    (
        "add_callback add_errback on_done then",
        "use add_done_callback(function), or produce(records, on_delivery=function)",
    ),
    ("succeeded successful is_done failed ok ready", "use done() and exception()"),
    ("offset sequence partition location", "use result(), which has sequence and location"),
)

_LIST_TOPICS = (
    "a topic is known by its URL, so there is no list of them; describe(url) describes one"
)

OF_ADMIN = _table(
    ("status info get_info describe_queue describe_topic describe_topics stats metrics",
     "use describe(url)"),
    ("lag get_lag backlog list_consumer_group_offsets describe_consumer_groups",
     "use list_readers(url) for a log, or describe(url)"),
    ("list_groups list_consumer_groups get_readers", "use list_readers(url)"),
    ("delete_group delete_consumer_groups remove_reader drop_reader",
     "use delete_reader(url, name)"),
    ("reset reset_offsets alter_consumer_group_offsets seek replay rewind",
     "use reset_reader(url, name, to)"),
    ("enable_readers make_log create_log", "use enable_log(url, retention=...)"),
    ("retention alter_configs update_retention", "use set_retention(url, retention=...)"),
    ("purge purge_queue truncate trim delete_records clear", "use trim_queue(url, ...)"),
    ("partitions describe_partitions get_partitions", "use list_partitions(url)"),
    ("create_partitions add_partition expand", "use add_partitions(url, ...)"),
    ("remove_partition delete_partition delete_partitions drain", "use drain_partition(url, ...)"),
    ("create_queue create_topics",
     "use create_topic(url, partitions); a producer creates a queue by itself"),
    ("delete_queue delete_topic delete_topics drop_topic",
     "stop its programs and delete the objects below its URL"),
    ("list_topics list_queues topics queues", _LIST_TOPICS),
    ("fsck check repair", "use fsck, a command of the shell"),
    ("gc collect", "use gc, a command of the shell; consumers collect by themselves"),
)  # fmt: skip
"""Names of functions in ``opendata_buffer.admin``."""

OF_TOPICS = _table(
    ("produce send publish producer", "use TopicProducer(url)"),
    ("consume subscribe consumer poll", "use TopicConsumer(url)"),
    ("partitions list_partitions num_partitions", "use read(), which describes the partitions"),
    ("delete drop", "stop its programs and delete the objects below its URL"),
)  # fmt: skip

OF_PACKAGE = _table(
    ("KafkaProducer AIOKafkaProducer SerializingProducer PublisherClient Writer", "use Producer"),
    ("KafkaConsumer AIOKafkaConsumer DeserializingConsumer SubscriberClient Reader Receiver",
     "use Consumer"),
    ("Queue Client connect Session client open create_queue", "use Producer and Consumer"),
    ("AdminClient KafkaAdminClient Admin", "use opendata_buffer.admin"),
    ("Message ConsumerRecord Entry", "use Record"),
    ("peek scan read_all to_arrow to_pandas read_table read_queue", "use read(url)"),
    ("status describe info lag", "use opendata_buffer.admin.describe(url)"),
    ("create_topic list_readers enable_log list_partitions topics list_topics",
     "use opendata_buffer.admin"),
    ("TransactionalProducer Transactional", "use Publisher"),
    ("KafkaException KafkaError Error BufferError Exception", "use OpenDataBufferError"),
    # Names of 0.1.
    ("DurabilityWatcher", "use WriteHandle"),
    ("TopicWatcher", "use TopicHandle"),
    ("TopicBatch", "use ConsumedBatch"),
    ("TopicArrowBatch", "use ArrowBatch"),
    ("PartitionPosition", "use Position"),
    ("RawBatch", "use ConsumedBatch or ArrowBatch"),
)  # fmt: skip
"""Names in the package."""
