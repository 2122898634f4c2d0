"""Records out: ``consume``."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.ending import last_words
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    NATURAL,
    SOON_MS,
    allow_foreign_option,
    create_if_missing_option,
    framing_option,
    max_batch_bytes_option,
    patient_queue_options,
    poll_interval_option,
    queue_words,
    recreate_option,
    refuse_together,
)
from opendata_buffer.cli.words import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from opendata_buffer.admin.start import Start
    from opendata_buffer.cli.pipe import Reader
    from opendata_buffer.cli.places import Place
    from opendata_buffer.cli.rendering import Render

__all__ = ["consume"]


@click.command()
@patient_queue_options
@framing_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print each record as a line of JSON, with partition, sequence, index, time, location, "
    "metadata and value; what is no text is in metadata_base64 and value_base64.",
)
@click.option(
    "--format",
    "template",
    metavar="FORMAT",
    help="Print each record as kcat does, such as '%o %s\\n': %s record, %S its length, %o "
    "sequence, %i index in its batch, %m metadata, %T time in milliseconds, %l location, %p "
    "partition, %R length as 4 bytes. Or 'table': JSON objects as rows with columns.",
)
@click.option(
    "--from",
    "from_",
    metavar="WHERE",
    help="Begin at 'earliest', 'latest', a sequence, or a time such as 2026-01-31T03:00:00Z, UTC "
    "without a zone; in a topic at sequences by partition such as '{\"0\": 42}'. Passing batches "
    "by is for --no-ack. Default: earliest.",
)
@click.option("--max-batches", type=NATURAL, metavar="N", help="Stop after N batches.")
@click.option("--follow", is_flag=True, help="Wait for more when the queue is empty.")
@create_if_missing_option
@click.option("--no-ack", is_flag=True, help="Only look: take over nothing, acknowledge nothing.")
@click.option(
    "--last-acked-sequence",
    type=NATURAL,
    metavar="N",
    help="Start after this sequence, and let those up to it leave the queue.",
)
@click.option("--gc/--no-gc", default=True, show_default=True, help="Collect garbage meanwhile.")
@poll_interval_option
@recreate_option
@max_batch_bytes_option
@allow_foreign_option
@click.pass_obj
def consume(
    runtime: Any,
    /,
    framing: str,
    as_json: bool,
    template: str | None,
    from_: str | None,
    max_batches: int | None,
    follow: bool,
    create_if_missing: bool,
    no_ack: bool,
    last_acked_sequence: int | None,
    gc: bool,
    poll_interval_ms: int,
    recreate: bool,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    **queue: Any,
) -> None:
    """Write the records of the queue to stdout, by default one line each.

    Takes the queue over (another consumer is fenced) and acknowledges batches after their
    records are written out: after a crash some may be written again. Ends when the queue is
    empty. With --no-ack nothing changes in the queue and its consumer is not disturbed. The last
    line on stderr, also after Ctrl-C, is JSON: "records" and "batches" are numbers, "bytes" is
    the size of the records, "last_sequence" that of the last batch written.

    Of a topic all partitions are read in turn, each in its order, and of transactions what is
    committed; "last_sequences" is by partition. --json and the %p of --format name it.
    """
    from opendata_buffer.admin.start import Starts
    from opendata_buffer.cli.pipe import RecordWriter, copy_out
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.cli.progress import counting
    from opendata_buffer.config import ConsumerConfig, GarbageCollectorConfig

    refuse_together(**{"--json": as_json, "--format": template, "--framing": framing != "lines"})
    refuse_together(**{"--from": from_, "--last-acked-sequence": last_acked_sequence is not None})
    starts = Starts.parse("earliest" if from_ is None else from_)
    # A look with a short deadline first: a mistyped path or a store that is down is told of soon,
    # and no queue is made there.
    place = place_of(
        runtime,
        queue,
        ConsumerConfig,
        look_ms=SOON_MS,
        gc=GarbageCollectorConfig(enabled=gc),
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )
    is_topic = place.topic is not None
    render = _render(framing, as_json, template, place.config.data_path_prefix)
    start_of = place.starts(starts, "--from")
    if is_topic and last_acked_sequence is not None:
        raise click.UsageError(
            f"--last-acked-sequence {last_acked_sequence}: {place.store.url} is a topic, and each "
            "partition counts for itself: name one with --partition"
        )
    if is_topic:
        _check_topic(place, runtime, start_of, starts.text, no_ack)
    else:
        start = None if from_ is None else start_of(place.config.data_path_prefix)
        _check_queue(place, runtime, start, no_ack, create_if_missing)

    stdout = sys.stdout.buffer
    with ExitStack() as stack:
        # The progress ends first, so that it does not hide the summary.
        writer = RecordWriter(stdout, render=render, topic=is_topic)
        stack.enter_context(last_words(writer.report))
        writer.advance = stack.enter_context(counting("consuming", quiet=stdout.isatty()))
        if is_topic:
            reader = _of_topic(stack, place, runtime, start_of, no_ack)
        elif no_ack:
            reader = _observing(place, runtime, last_acked_sequence, start)
        else:
            reader = _owning(stack, place, runtime, last_acked_sequence)
        wait = (lambda: runtime.sleep(poll_interval_ms / 1000)) if follow else None
        copy_out(reader, writer, max_batches=max_batches, wait=wait)
    click.echo(writer.report(), err=True)


def _render(framing: str, as_json: bool, template: str | None, partition: str) -> Render:
    from opendata_buffer.cli import rendering
    from opendata_buffer.cli.pipe import framed
    from opendata_buffer.framing import FRAMINGS

    if as_json:
        return rendering.as_json(partition)
    if template == "table":
        from opendata_buffer.cli.table import as_table

        return as_table()
    if template is not None:
        return rendering.by_format(template, partition)
    return framed(FRAMINGS[framing])


def _soon(config: Any) -> Any:
    return replace(config, cas_deadline_ms=min(config.cas_deadline_ms, SOON_MS))


def _check_queue(
    place: Place, runtime: Any, start: Start | None, no_ack: bool, create_if_missing: bool
) -> None:
    """Whether there is a queue, and nothing is passed by."""
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.queue.ownership import check_owner

    soon = _soon(place.config)
    # A queue whose manifest was lost may be started over, by its marker; where there is neither
    # there is no queue.
    started_over = soon.recreate and check_owner(place.store, soon, runtime=runtime) is not None
    if no_ack or not (create_if_missing or started_over):
        found = Observer(place.store, soon, runtime).manifest()
        if start is not None and not no_ack:
            passed = start.sequence_in(found, soon.manifest_path) - found.first_sequence
            _refuse_passing_by(start.text, passed, found.first_sequence + passed - 1)


def _check_topic(
    place: Place, runtime: Any, start_of: Callable[[str], Start], text: str, no_ack: bool
) -> None:
    """Whether each partition has its place to begin at, and nothing is passed by."""
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.formats.manifest import Manifest

    passed = 0
    for config in place.configs():
        start = start_of(config.data_path_prefix)
        if start.is_earliest:
            continue
        found = Observer(place.store, _soon(config), runtime).find() or Manifest.empty()
        passed += start.sequence_in(found, config.manifest_path) - found.first_sequence
    if not no_ack:
        _refuse_passing_by(text, passed)


def _refuse_passing_by(text: str, passed: int, through: int | None = None) -> None:
    """A consumer begins at the oldest batch: what it passed by would leave the queue unread."""
    if passed > 0:
        until = "" if through is None else f", up to sequence {through}"
        raise Failure(
            f"--from {text} would drop {plural(passed, 'batch')} unread{until}: look at what is "
            "behind with --no-ack, or drop them with 'opendata-buffer seek "
            f"{queue_words()} --to {shlex.quote(text)}', which keeps a copy"
        )


def _observing(
    place: Place, runtime: Any, last_acked_sequence: int | None, start: Start | None
) -> Reader:
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.cli.readers import ObservingReader
    from opendata_buffer.consumer.fetch import FetchHandle

    observer = Observer(place.store, place.config, runtime)
    handle = FetchHandle.of(place.config, store=place.store)
    key = place.config.manifest_path
    first = None if start is None else start.sequence_in(observer.manifest(), key)
    return ObservingReader(
        observer.manifest, key, handle, runtime, last_acked_sequence, start=first
    )


def _owning(
    stack: ExitStack, place: Place, runtime: Any, last_acked_sequence: int | None
) -> Reader:
    from opendata_buffer.cli.readers import OwningReader
    from opendata_buffer.consumer.consumer import Consumer

    consumer = stack.enter_context(
        Consumer(
            place.config,
            last_acked_sequence,
            store=place.store,
            runtime=runtime,
            program=_PROGRAM,
        )
    )
    return OwningReader(consumer, runtime)


def _of_topic(
    stack: ExitStack,
    place: Place,
    runtime: Any,
    start_of: Callable[[str], Start],
    no_ack: bool,
) -> Reader:
    from opendata_buffer.admin.observe import Observer
    from opendata_buffer.admin.start import EARLIEST, Start
    from opendata_buffer.cli.readers import ObservedPartition, ObservingTopic, OwningTopic
    from opendata_buffer.consumer.fetch import FetchHandle
    from opendata_buffer.topic.consumer import REFRESH_S, TopicConsumer
    from opendata_buffer.topic.topic import CachedTopic

    if not no_ack:
        consumer = TopicConsumer(place.config, store=place.store, runtime=runtime, program=_PROGRAM)
        return OwningTopic(stack.enter_context(consumer))
    topic = place.topic
    assert topic is not None
    current = CachedTopic(topic, runtime, REFRESH_S)

    def opened(name: str, added: bool) -> ObservedPartition:
        config = topic.config_of(name, place.config)
        return ObservedPartition(
            Observer(place.store, config, runtime),
            FetchHandle.of(config, store=place.store),
            Start(EARLIEST) if added else start_of(name),
        )

    return ObservingTopic(lambda: current.get().names, opened, runtime)


_PROGRAM = "opendata-buffer consume"
