"""Hints: the remedies of errors as data, in the words of the place that shows them.

The problem: the same error may reach a Python program, a command line, or a Spark query, and the
remedy has another name in each. To wait longer, a program sets ``timeout_ms``, and a command takes
``--timeout-ms``. A command to run must name the store, the partition, and the endpoint, which the
code that finds the fault may not know.

The idea: the message of an error is a sequence of parts (:class:`Message`). A part is plain text,
the name of a setting (:class:`Setting`), or a :class:`Hint`: an :class:`Action` with its values. A
hint has no text until it is shown on a :class:`Surface`. For example::

    error = Conflict("ingest/manifest", attempts=12, waited_s=60.0)
    error.hints                  # (Hint(Action.LET_FEWER_WRITE),)
    str(error)                   # "... Try again, raise timeout_ms, or let fewer ..."
    error.text(Surface.SHELL)    # "... Try again, raise --timeout-ms, or let fewer ..."

Code that does not know its queue leaves :attr:`Hint.queue` out, and the caller that knows it calls
``error.at(queue)``.

To add a hint, add a member to :class:`Action`. A test shows every member on every surface and runs
the commands that it prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import Enum, auto
from typing import Any, NamedTuple


class Surface(Enum):
    """A place that shows errors, with names of its own for settings and remedies."""

    PYTHON = auto()
    SHELL = auto()
    SPARK = auto()


_FLAGS = {"delivery_timeout_ms": "--timeout-ms"}
"""Settings whose option of the command line has another name."""

_OPTIONS = {"store": "path"}
"""Settings whose option of Spark has another name."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The name of a setting in a message.

    Attributes:
        name: The field of a configuration, such as ``timeout_ms``.
    """

    name: str

    def text(self, surface: Surface) -> str:
        """Return the name: ``timeout_ms``, ``--timeout-ms``, or ``timeoutMs``."""
        if surface is Surface.SHELL:
            return _FLAGS.get(self.name) or "--" + self.name.replace("_", "-")
        if surface is Surface.SPARK:
            first, *others = self.name.split("_")
            return _OPTIONS.get(self.name) or first + "".join(map(str.capitalize, others))
        return self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class QueueName:
    """The name of a queue or topic, for a message or a command. It never contains a secret.

    Attributes:
        store: The URL of the store.
        manifest_path: The key of the manifest.
        options: The settings that a command needs to find the queue and to reach its store, with
            their values. Settings with their default value are left out.
    """

    store: str
    manifest_path: str
    options: tuple[tuple[str, str | bool], ...] = ()

    @property
    def place(self) -> str:
        """The manifest and its store, as errors name them."""
        return f"{self.manifest_path!r} in {self.store}"

    def within(self, partition: str) -> QueueName:
        """Return the name of a partition of this topic."""
        place = ("data_path_prefix", "manifest_path", "partition")
        options = [(name, value) for name, value in self.options if name not in place]
        manifest = f"{partition}/manifest"
        return QueueName(self.store, manifest, (("partition", partition), *options))

    def words(self) -> str:
        """Return the arguments by which a command finds the queue, quoted for a shell."""
        import shlex  # only for a message that is shown

        found = [self.store]
        for name, value in self.options:
            found.append(Setting(name).text(Surface.SHELL))
            if value is not True:
                found.append(str(value))
        return shlex.join(found)


class Texts(NamedTuple):
    """The text of an action on each surface; Python's if a surface has no text of its own.

    A text is a template: braces name an attribute of :class:`Hint`.
    """

    python: str
    shell: str | None = None
    spark: str | None = None

    def on(self, surface: Surface) -> str:
        """Return the template for a surface."""
        own = {Surface.SHELL: self.shell, Surface.SPARK: self.spark}.get(surface)
        return self.python if own is None else own


class Action(Enum):
    """A remedy, with its text on each surface."""

    # ---- Manifests
    REPAIR_MANIFEST = Texts(
        "Stop producers, consumers and collectors. 'opendata-buffer fsck {queue}' lists the "
        "damage, and 'opendata-buffer fsck {queue} --repair' repairs it."
    )
    RESTORE_OR_REPAIR_MANIFEST = Texts(
        "Restore the object's latest version (bucket versioning), or stop producers, consumers and "
        "collectors and run 'opendata-buffer fsck {queue} --repair'."
    )
    RESTORE_OR_REBUILD_MANIFEST = Texts(
        "Stop producers, consumers and collectors. Restore the latest version (bucket versioning), "
        "or let 'opendata-buffer fsck {queue} --repair' enqueue the batches again that are still "
        "there."
    )
    START_OVER = Texts(
        "To start over without them, use 'opendata-buffer produce {queue} --recreate'."
    )
    REPAIR = Texts("Stop everything and repair it with 'opendata-buffer fsck {queue} --repair'.")
    INSPECT = Texts("Look at it with 'opendata-buffer status {queue}'.")
    LET_FEWER_WRITE = Texts(
        "Try again, raise timeout_ms, or let fewer processes write this manifest.",
        shell="Try again, raise --timeout-ms, or let fewer processes write this manifest.",
        spark="Try again, or let fewer processes write this manifest.",
    )
    READ_FASTER = Texts("Start or speed up the consumer.")
    KEEP_BATCHES = Texts(
        "Do not delete the batches. Producing the records again may duplicate them; a transaction "
        "identity lets the reader drop the repeat.",
        spark="Do not delete the batches. Writing the records again may duplicate them; with the "
        "option txnAppId, the reader drops the repeat.",
    )

    # ---- One batch
    SKIP_BATCH = Texts(
        "Restore the object, or skip the batch with skip({sequence}); its records are then lost.",
        shell="Restore the object, or run 'opendata-buffer skip {queue} {sequence}', which copies "
        "it to the quarantine first.",
        spark="Restore the object, or stop the query and run 'opendata-buffer skip {queue} "
        "{sequence}', which copies it to the quarantine first.",
    )
    SKIP_BATCH_OF_PARTITION = Texts(
        "Restore the object, or skip the batch with skip({partition!r}, {sequence}); its records "
        "are then lost.",
        shell="Restore the object, or run 'opendata-buffer skip {queue} {sequence}', which copies "
        "it to the quarantine first.",
        spark="Restore the object, or stop the query and run 'opendata-buffer skip {queue} "
        "{sequence}', which copies it to the quarantine first.",
    )
    SKIP_BATCH_OF_LOG = Texts(
        "Restore the object, or skip the batch with skip({sequence}); its records are then lost.",
        shell="Restore the object.",
        spark="Restore the object.",
    )
    RESET_PAST_BATCH = Texts(
        "Restore the object, or stop this reader and continue after it with {resets}: its records "
        "are then lost.",
        spark="Restore the object.",
    )
    TOLERATE_MISSING = Texts("A query skips it with the option failOnDataLoss set to false.")
    TOLERATE_UNREADABLE = Texts(
        "A query copies it to the quarantine and continues with the option corruptBatches set to "
        "quarantine."
    )
    CHOOSE_MODE = Texts(
        "Set mode to PERMISSIVE for a row of nulls with the record's text in a column "
        "_corrupt_record, or to DROPMALFORMED to leave such records out."
    )

    # ---- Lost batches
    ACCEPT_LOSS = Texts(
        "To accept the loss, set allow_data_loss to True.",
        shell="Read from the oldest batch that is there.",
        spark="To skip the lost batches and continue with those that are queued now, set the "
        "option failOnDataLoss to false. To start as a new query, give it a new "
        "checkpointLocation.",
    )
    RESET_READER = Texts(
        "To accept the loss, stop this reader and run {resets}.",
        spark="To skip the lost batches, set the option failOnDataLoss to false.",
    )
    RESET_READER_TO_EARLIEST = Texts(
        "To accept the loss, set allow_data_loss to True, or run 'opendata-buffer readers reset "
        "{queue} {readers[0]} --to-earliest'.",
        shell="To accept the loss, run 'opendata-buffer readers reset {queue} {readers[0]} "
        "--to-earliest'.",
        spark="To skip the lost batches, set the option failOnDataLoss to false.",
    )
    READ_FROM_EARLIEST = Texts(
        "Read with startingOffsets 'earliest', or set failOnDataLoss to false."
    )
    START_AT_QUEUED = Texts("Start at 'earliest' or at a sequence that is still queued.")

    # ---- Ownership
    STOP_CONSUMER = Texts(
        "'opendata-buffer status {queue}' shows which. Stop this one; a queue has one consumer at "
        "a time.",
        spark="'opendata-buffer status {queue}' shows which. Stop this query; a queue has one "
        "consumer at a time. Or this query loads the queue twice: {one_load} To look at a queue "
        "that another query reads, set the option acknowledge to false.",
    )
    STOP_READER = Texts(
        "'opendata-buffer status {queue}' shows which program has the reader now. If another "
        "program reads by this name, stop this one or give it a name of its own; after a reset, "
        "start it again.",
        spark="'opendata-buffer status {queue}' shows which program has the reader now. If another "
        "program reads by this name, stop this query or give it a name of its own; after a reset, "
        "start it again. Or this query loads the log twice by one name: in that case give each "
        "load() its own option reader. {one_load}",
    )
    STOP_OTHER_RUN = Texts(
        "If you have just started the program again, or ended its transactions by a command, this "
        "is the old run: let it end. Otherwise two publishers share one name: stop one, then start "
        "the other again.",
        spark="If you have just started the query again, or ended its transactions by a command, "
        "this is the old run: let it end. Otherwise two drivers share one checkpoint or txnAppId: "
        "stop one, then start the other again.",
    )
    HOLD_CLAIM_LONGER = Texts(
        "Raise claim_timeout_ms, or see what kept the worker from running.",
        shell="Raise --claim-timeout-ms, or see what kept the worker from running.",
        spark="Raise the timeout of claims, or see what kept the worker from running.",
    )

    # ---- Producers
    PRODUCE_AGAIN = Texts("Produce their records again with a new producer.")
    PRODUCE_KNOWN_AGAIN = Texts(
        "{count} of them may be in the queue nevertheless: their handles raise CommitStateUnknown. "
        "Producing these again may duplicate their records, unless they carry a Transaction: look "
        "in the queue first. Produce the records of all others again with a new producer.",
        shell="{count} of them may be in the queue nevertheless: look there first, because "
        "producing these again may duplicate their records. Produce all others again.",
    )
    PRODUCE_TO_OTHERS = Texts(
        "Produce these records again: a TopicProducer gives their keys to the current partitions. "
        "(It does not do so by itself, because later records of a key may already be there.)",
        shell="Produce these records again to the whole topic: their keys then go to the current "
        "partitions.",
        spark="Start the query again: it writes to the current partitions.",
    )
    WAIT_LONGER_FOR_DELIVERY = Texts(
        "Look at the store, or raise delivery_timeout_ms.",
        shell="Look at the store, or raise --timeout-ms.",
        spark="Look at the store.",
    )

    # ---- Finding a queue
    CREATE_QUEUE = Texts(
        "Produce into it first, or create it with create_if_missing=True, or name the right queue "
        "with data_path_prefix or manifest_path.",
        shell="Produce into it first, or create it with --create-if-missing, or name the right "
        "queue with --data-path-prefix or --manifest-path.",
        spark="Produce into it first, or set the option createIfMissing to true, or name the right "
        "queue with the option dataPathPrefix or manifestPath.",
    )
    FIND_QUEUE = Texts(
        "Produce into it first, or name the right queue with data_path_prefix or manifest_path.",
        shell="Produce into it first, or name the right queue with --data-path-prefix or "
        "--manifest-path.",
        spark="Produce into it first, or name the right queue with the option dataPathPrefix or "
        "manifestPath.",
    )
    USE_PARENT = Texts(
        "Use store={path!r} with data_path_prefix={prefix!r}.",
        shell="Name the queue {queue}.",
        spark='Use load("{path}") with .option("dataPathPrefix", "{prefix}").',
    )
    CREATE_IF_MISSING = Texts(
        "For a query that starts before its first producer, set the option createIfMissing to true."
    )
    FIND_LOST_QUEUE = Texts(
        "Name its manifest with manifest_path. If the manifest was lost, 'opendata-buffer fsck "
        "{queue} --repair' makes a new one that names these batches. If a producer is just writing "
        "its first batch, try again. A new queue needs a data_path_prefix of its own.",
        shell="Name its manifest with --manifest-path. If the manifest was lost, 'opendata-buffer "
        "fsck {queue} --repair' makes a new one that names these batches. If a producer is just "
        "writing its first batch, try again. A new queue needs its own --data-path-prefix.",
        spark="Name its manifest with the option manifestPath. If the manifest was lost, "
        "'opendata-buffer fsck {queue} --repair' makes a new one that names these batches. If a "
        "producer is just writing its first batch, try again. A new queue needs another "
        "dataPathPrefix.",
    )
    FIND_MANIFEST = Texts(
        "If so, give its path as manifest_path.",
        shell="If so, give its path with --manifest-path.",
        spark="If so, give its path with the option manifestPath.",
    )
    USE_OTHER_MANIFEST = Texts(
        "To use that queue, give manifest_path={path!r}. To make another queue, give it a "
        "data_path_prefix of its own.",
        shell="To use that queue, give --manifest-path={path!r}. To make another queue, give it "
        "its own --data-path-prefix.",
        spark='To use that queue, set .option("manifestPath", "{path}"). To make another queue, '
        "give it another dataPathPrefix.",
    )
    CORRECT_OWNER = Texts(
        "If nothing but a wrong option made its owner marker, 'opendata-buffer fsck {queue} "
        "--repair' gives the prefix to this queue."
    )
    USE_PREFIX = Texts(
        "Use data_path_prefix={prefix!r}.",
        shell="Use --data-path-prefix={prefix!r}.",
        spark='Set .option("dataPathPrefix", "{prefix}").',
    )
    USE_PREFIX_AND_MANIFEST = Texts(
        "Use data_path_prefix={prefix!r} and manifest_path={path!r}.",
        shell="Use --data-path-prefix={prefix!r} and --manifest-path={path!r}.",
        spark='Set .option("dataPathPrefix", "{prefix}").option("manifestPath", "{path}").',
    )
    MOVE_OWNER = Texts(
        "If {path!r} is there, 'opendata-buffer fsck {queue} --repair' puts it where it belongs."
    )

    # ---- Topics
    NAME_PARTITION = Texts(
        "Use TopicConsumer, or name a partition by data_path_prefix.",
        shell="Name a partition with --partition.",
        spark="Name a partition with the option dataPathPrefix.",
    )
    LIST_PARTITIONS = Texts("'opendata-buffer status {queue}' lists the partitions.")
    USE_DEFAULT_MANIFEST = Texts(
        "Leave out manifest_path={path!r}. To use one partition alone, name it with "
        "data_path_prefix.",
        shell="Leave out --manifest-path={path!r}. To use one partition alone, name it with "
        "--partition.",
        spark='Leave out .option("manifestPath", "{path}"). To use one partition alone, name it '
        "with the option dataPathPrefix.",
    )
    USE_TOPIC = Texts(
        "Use a TopicProducer or TopicConsumer, one partition (data_path_prefix='p-00000-04pn'), or "
        "another store for a queue.",
        shell="Name the topic without a data prefix, or one partition with --partition, or use "
        "another store for a queue.",
        spark="Leave out the options dataPathPrefix and manifestPath to use the topic, name one "
        "partition with dataPathPrefix, or use another store for a queue.",
    )
    CREATE_TOPIC = Texts("'opendata-buffer topic create {queue} --partitions 4' makes a topic.")
    EXPAND_TOPIC = Texts(
        "Use it, add partitions with 'opendata-buffer topic expand {queue} --partitions {count}', "
        "or take another root for the new one."
    )
    EXPAND_FIRST = Texts(
        "Add others first, with 'opendata-buffer topic expand {queue} --partitions {count}'."
    )
    DRAIN_PARTITION = Texts(
        "Remove partitions one at a time, with 'opendata-buffer topic drain {queue} {partition}'."
    )
    END_TRANSACTION = Texts("'opendata-buffer abort {queue} {producer}' ends it.")
    RESTART_OR_END_TRANSACTION = Texts(
        "Start its writer again, or end it with 'opendata-buffer abort {queue} {producer}'."
    )
    COMPLETE_TRANSACTION = Texts(
        "Run 'opendata-buffer abort {queue} {producer}': that completes it."
    )
    LIST_TRANSACTIONS = Texts("See 'opendata-buffer status {queue}'.")
    WAIT_FOR_TRANSACTIONS = Texts(
        "Continue with read_committed until they are decided ('opendata-buffer status {queue}' "
        "shows them), or give the query a new checkpointLocation."
    )

    # ---- Logs
    NAME_READER = Texts(
        "Add reader=NAME, for example with the name of this program. 'opendata-buffer readers list "
        "{queue}' shows the readers that it has.",
        shell="Add --reader NAME, for example with the name of this program. 'opendata-buffer "
        "readers list {queue}' shows the readers that it has.",
        spark="Set the option reader, for example to the name of this query. 'opendata-buffer "
        "readers list {queue}' shows the readers that it has.",
    )
    ENABLE_READERS = Texts(
        "'opendata-buffer readers enable {queue}' or admin.enable_log() makes it one.",
        shell="'opendata-buffer readers enable {queue}' makes it one, and says what changes.",
        spark="'opendata-buffer readers enable {queue}' makes it one, and says what changes.",
    )
    KEEP_RECORDS = Texts(
        "To keep them for other readers and for replays, make a log: 'opendata-buffer readers "
        "enable {queue} --retention 7d'."
    )
    KEEP_LESS = Texts(
        "To keep less, give another retention, such as 'opendata-buffer readers enable {queue} "
        "--retention 1d'. To move a reader on, use 'readers reset'; 'opendata-buffer readers list "
        "{queue}' shows them."
    )
    CORRECT_RETENTION = Texts(
        "Use a time such as timedelta(days=7), or a number of bytes. To keep a batch only until "
        "all readers have acknowledged it, set no retention.",
        shell="Use 'none', which keeps a batch until all readers have acknowledged it, or a time "
        "such as 7d, or a size such as 500GB.",
        spark="Use 'opendata-buffer readers enable {queue} --retention 7d'.",
    )
    REGISTER_READER = Texts("Register it with 'opendata-buffer readers enable {queue}'.")
    FORGET_READER = Texts(
        "If it will not return, run 'opendata-buffer readers delete {queue} {readers[0]}'."
    )
    KEEP_OR_DELETE_READER = Texts(
        "Start the reader to keep it, or run 'opendata-buffer readers delete {queue} {readers[0]}'."
    )
    DELETE_READERS = Texts(
        "Delete some with readers delete. 'opendata-buffer readers list {queue}' shows them."
    )
    RESTORE_POSITION = Texts(
        "Restore its latest version (bucket versioning), or delete it and run 'opendata-buffer "
        "readers reset {queue} {readers[0]} --to-earliest', which reads again what is kept."
    )
    REBUILD_INDEX = Texts(
        "Restore its latest version (bucket versioning): it says what the log keeps. "
        "'opendata-buffer fsck {queue} --repair' builds a new one. If 'opendata-buffer readers "
        "enable {queue}' was interrupted, run it again."
    )
    REPAIR_OLD_INDEX = Texts(
        "Stop producers, consumers, and collectors, and run 'opendata-buffer fsck {queue} "
        "--repair', which finds them again."
    )
    RESET_PAST_SEGMENT = Texts(
        "Restore the object (bucket versioning), or continue after them with {resets}."
    )
    RESET_READERS_PAST_SEGMENT = Texts(
        "Restore the object (bucket versioning), or set each reader that stops there to sequence "
        "{sequence} with 'readers reset'. 'opendata-buffer readers list {queue}' shows where they "
        "are."
    )
    RESET_AFTER_REPAIR = Texts(
        "Once that is repaired, a reader that was moved past them reads them after {resets}."
    )
    RESET_FAILING_READERS = Texts("Stop each reader that fails, and run {resets}.")
    RESET_READER_TO_OLDEST = Texts(
        "'opendata-buffer readers reset {queue} {readers[0]} --to-earliest --partition "
        "{partition}' lets it continue with the oldest batch that is kept."
    )
    RESET_TO_CONTINUE = Texts("To continue after the rebuild, run {resets}.")
    RESET_READERS_PAST = Texts("Restore the objects, or stop the readers and run {resets}.")

    # ---- Workers, the collector, and the quarantine
    REPLACE_CLAIMS = Texts(
        "'opendata-buffer fsck {queue} --repair' saves its bytes next to it and removes it: then "
        "every batch in the queue is handed out again."
    )
    SKIP_FOR_WORKERS = Texts(
        "To continue after it, stop the workers and run 'opendata-buffer skip {queue} {sequence}'."
    )
    RESET_FOR_WORKERS = Texts("To continue after it, stop the workers and run {resets}.")
    SKIP_TOO_LARGE = Texts(
        "Skip it with 'opendata-buffer skip {queue} {sequence}', which copies it first."
    )
    SKIP_FOREIGN = Texts("Skip it with 'opendata-buffer skip {queue} {sequence}'.")
    SKIP_FOR_COLLECTOR = Texts(
        "Restore the object, or skip the batch with 'opendata-buffer skip {queue} {sequence}'."
    )
    CHANGE_GRACE_PERIOD = Texts(
        "'opendata-buffer gc {queue} --grace-period-ms {count}' changes that for all programs."
    )
    LIST_QUARANTINE = Texts("'opendata-buffer status {queue}' lists the batches in quarantine.")
    LIST_SKIPPED = Texts(
        "'opendata-buffer status {queue}' lists the batches that were skipped or trimmed."
    )
    DISCARD_BACKLOG = Texts(
        "To read them, start at 'earliest'. To discard them once and keep a copy, run "
        "'opendata-buffer trim {queue} --to {sequence}', or admin.trim_queue(). To let each "
        "program begin where it likes, make a log: 'opendata-buffer readers enable {queue}', or "
        "admin.enable_log().",
        shell="To read them, start at 'earliest'. To discard them once and keep a copy, run "
        "'opendata-buffer trim {queue} --to {sequence}'. To let each program begin where it likes, "
        "make a log: 'opendata-buffer readers enable {queue}'.",
        spark="To read them, start at 'earliest'. To discard them once and keep a copy, run "
        "'opendata-buffer trim {queue} --to {sequence}'. To let each query begin where it likes, "
        "make a log: 'opendata-buffer readers enable {queue}'.",
    )
    TRIM_FIRST = Texts(
        "To read without taking anything, set the option acknowledge to false. To delete them "
        "first and keep a copy, run 'opendata-buffer trim {queue} --to {sequence}'. To read them, "
        "start at 'earliest'."
    )
    FORCE = Texts(
        "To do it anyway, pass force=True.",
        shell="To do it anyway, give --force.",
        spark="To do it anyway, use the command line with its option force.",
    )

    # ---- Stores
    SET_REGION = Texts(
        "Set the bucket's own region, and endpoint_url to the store itself.",
        shell="Set --region to the bucket's own, and --endpoint-url to the store itself.",
        spark="Set the option region to the bucket's own, and endpointUrl to the store itself.",
    )
    CORRECT_ROLE = Texts(
        "Let these credentials assume the role (sts:AssumeRole, and its trust policy), and correct "
        "role_arn and external_id.",
        shell="Let these credentials assume the role (sts:AssumeRole, and its trust policy), and "
        "correct --role-arn and --external-id.",
        spark="Let these credentials assume the role (sts:AssumeRole, and its trust policy), and "
        "correct the options roleArn and externalId.",
    )
    CORRECT_CLIENT = Texts(
        "Correct endpoint_url, region, profile or the AWS configuration files.",
        shell="Correct --endpoint-url, --region, --profile or the AWS configuration files.",
        spark="Correct the options endpointUrl and region, or the AWS configuration files.",
    )


_ONE_LOAD = (
    "Spark reads a DataFrame that is joined with itself as two sources. load() it once in a query; "
    "that DataFrame may be used several times in a union. Join within foreachBatch, where a "
    "micro-batch can be joined with itself."
)


@dataclass(frozen=True, slots=True)
class Hint:
    """An action with the values that its text names.

    Attributes:
        action: What to do.
        queue: The queue that a command names. None if the code that made the hint does not know
            it; commands then show the word ``STORE``.
        sequence: A sequence of the queue.
        partition: The name of a partition of a topic.
        readers: The names of readers of a log.
        path: The key of a manifest or of another object.
        prefix: A data prefix.
        producer: The id of a producer, in hexadecimal digits.
        count: A number, such as one of partitions or milliseconds.
    """

    action: Action
    queue: QueueName | None = None
    sequence: int | None = None
    partition: str = ""
    readers: tuple[str, ...] = ()
    path: str = ""
    prefix: str = ""
    producer: str = ""
    count: int | None = None

    def at(self, queue: QueueName) -> Hint:
        """Return the hint for a queue, unless it already names one."""
        return self if self.queue is not None else replace(self, queue=queue)

    def text(self, surface: Surface) -> str:
        """Return the text for a surface: one or more whole sentences."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["queue"] = "STORE" if self.queue is None else self.queue.words()
        values["resets"] = ", ".join(map(self._reset, self.readers))
        values["one_load"] = _ONE_LOAD
        template: Texts = self.action.value
        return template.on(surface).format_map(values)

    def _reset(self, reader: str) -> str:
        """Return the command, in quotes, that sets a reader to the sequence."""
        queue = "STORE" if self.queue is None else self.queue.words()
        return f"'opendata-buffer readers reset {queue} {reader} --to-sequence {self.sequence}'"

    def __str__(self) -> str:
        return self.text(Surface.PYTHON)


Part = str | Setting | Hint
"""A part of a message."""


def render(parts: Iterable[object], surface: Surface, *, with_hints: bool = True) -> str:
    """Put the parts of a message together for a surface.

    A hint begins a new sentence, and the text after it another one. All else is joined as it is.

    Args:
        parts: The parts of the message. Other objects are shown as ``str()`` shows them.
        surface: Where the message is shown.
        with_hints: Show the hints; otherwise the message is the problem alone.

    Returns:
        The message.
    """
    found, after_hint = "", False
    for part in parts:
        if isinstance(part, Hint):
            if with_hints:
                found = _sentence(found) + part.text(surface)
            after_hint = True
            continue
        text = part.text(surface) if isinstance(part, Setting) else str(part)
        found = _sentence(found) + text.lstrip() if after_hint and text else found + text
        after_hint = False
    return found


def _sentence(text: str) -> str:
    """Return a text to which a sentence can be appended."""
    text = text.rstrip()
    if not text:
        return text
    return f"{text} " if text.endswith((".", "?", "!", ":")) else f"{text}. "


class Message(str):
    """A text in parts that is not an error, such as the reason why nothing was collected.

    As a string it is the message in the words of Python.
    """

    __slots__ = ("parts",)
    parts: tuple[Part, ...]

    def __new__(cls, *parts: Part) -> Message:
        """Put the parts together."""
        self = super().__new__(cls, render(parts, Surface.PYTHON))
        self.parts = parts
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Message, self.parts)

    @property
    def hints(self) -> tuple[Hint, ...]:
        """The remedies in the message."""
        return tuple(part for part in self.parts if isinstance(part, Hint))

    def at(self, queue: QueueName) -> Message:
        """Return the message with the queue in those hints that do not name one."""
        parts = (part.at(queue) if isinstance(part, Hint) else part for part in self.parts)
        return Message(*parts)

    def text(self, surface: Surface) -> str:
        """Return the message for a surface."""
        return render(self.parts, surface)
