"""Records in: ``produce``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.ending import last_words
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    POSITIVE,
    framing_option,
    max_batch_bytes_option,
    patient_queue_options,
    recreate_option,
    refuse_together,
)
from opendata_buffer.errors import InvalidInput
from opendata_buffer.formats import MIB

if TYPE_CHECKING:
    from opendata_buffer.cli.described import Described

__all__ = ["produce"]


@click.command()
@patient_queue_options
@click.option(
    "--compression",
    type=click.Choice(["none", "zstd"], case_sensitive=False),
    default="none",
    show_default=True,
    help="Of batches, as they are stored.",
)
@framing_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Each line is a record as 'consume --json' prints it, with its metadata.",
)
@click.option(
    "--file",
    "files",
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    metavar="PATH",
    help="A file that is one record, instead of stdin. May be given again.",
)
@click.option("--metadata", default="", metavar="TEXT", help="Goes with every record.")
@click.option(
    "--metadata-from",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="PATH",
    help="A file whose line N is the metadata of record N.",
)
@click.option("--key", metavar="TEXT", help="Of a topic: the key of every record.")
@click.option(
    "--key-from",
    type=click.Path(exists=True, dir_okay=False, readable=True),
    metavar="PATH",
    help="Of a topic: a file whose line N is the key of record N.",
)
@click.option(
    "--key-is-metadata", is_flag=True, help="Of a topic: a record's metadata is its key, too."
)
@click.option(
    "--partitioner",
    type=click.Choice(["modulo", "rendezvous"]),
    default="modulo",
    show_default=True,
    help="Of a topic: how keys are mapped to partitions; the same for all who write to it.",
)
@click.option(
    "--flush-interval-ms",
    type=POSITIVE,
    default=100,
    show_default=True,
    help="Age of its oldest record at which a batch is written.",
)
@click.option(
    "--flush-size-bytes",
    type=POSITIVE,
    default=64 * MIB,
    show_default=True,
    help="Size at which a batch is written sooner.",
)
@click.option(
    "--broker",
    type=click.Choice(["auto", "host", "off"]),
    default="auto",
    show_default=True,
    help="auto: through the queue's broker if there is one; host: be one while there is none; "
    "off: append alone.",
)
@recreate_option
@max_batch_bytes_option
@click.pass_obj
def produce(
    runtime: Any,
    /,
    framing: str,
    compression: str,
    as_json: bool,
    files: tuple[str, ...],
    metadata: str,
    metadata_from: str | None,
    key: str | None,
    key_from: str | None,
    key_is_metadata: bool,
    partitioner: str,
    flush_interval_ms: int,
    flush_size_bytes: int,
    broker: str,
    recreate: bool,
    max_batch_bytes: int,
    **queue: Any,
) -> None:
    r"""Put the records of stdin into the queue, by default one for each line.

    Of a line the newline is stripped, nothing else (a "\r" stays). A record that is none in its
    --framing ends the command, which says which one, at which byte, and that those before it are
    durable. Exits 0 only when all records are; the last line of stdout is then JSON: "records"
    and "batches" are numbers, "bytes" is the size of the records without what separates them.

    Into a topic a record goes by its key: records of one key stay in order. With --json it may
    bring one as "key" or "key_base64". Records without one go to the partitions in turn. Keys
    are not kept: what the reader is to see of them goes into metadata or the record.
    """
    from opendata_buffer.cli.described import FromJson, FromLines, Keyed, Lines, Same
    from opendata_buffer.cli.intake import Intake, into_queue, into_topic
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.cli.progress import counting
    from opendata_buffer.config import ProducerConfig
    from opendata_buffer.errors import OpenDataBufferError
    from opendata_buffer.formats.batch import Compression
    from opendata_buffer.framing import FRAMINGS
    from opendata_buffer.producer.producer import Producer
    from opendata_buffer.topic import partitioner as mapping
    from opendata_buffer.topic.producer import TopicProducer

    refuse_together(**{"--json": as_json, "--file": bool(files), "--framing": framing != "lines"})
    refuse_together(
        **{"--json": as_json, "--metadata": bool(metadata), "--metadata-from": metadata_from}
    )
    keyed = {
        "--key": key is not None, "--key-from": key_from, "--key-is-metadata": key_is_metadata,
    }  # fmt: skip
    refuse_together(**keyed)
    refuse_together(**{"--json": as_json, "--key-from": key_from})
    if sys.stdin is None and not files:
        raise Failure("standard input is closed: pipe the records into the command")
    place = place_of(
        runtime,
        queue,
        ProducerConfig,
        delivery_timeout_ms=queue["timeout_ms"],
        compression=Compression[compression.upper()],
        flush_interval_ms=flush_interval_ms,
        flush_size_bytes=flush_size_bytes,
        broker=broker,
        recreate=recreate,
        max_batch_bytes=max_batch_bytes,
    )
    if place.topic is None:
        _refuse_keys(keyed, place.store.url)
    config = place.config
    with ExitStack() as stack:

        def lines(path: str, noun: str) -> Lines:
            return Lines(stack.enter_context(open(path, "rb")), path, noun)

        described: Described = Same(os.fsencode(metadata))
        if as_json:
            described = FromJson(keyed=place.topic is not None)
        elif metadata_from is not None:
            described = FromLines(lines(metadata_from, "metadata"))
        if key is not None:
            same = os.fsencode(key)
            described = Keyed(described, lambda metadata: same)
        elif key_from is not None:
            keys = lines(key_from, "key")
            described = Keyed(described, lambda metadata: keys.next(), keys.finish)
        elif key_is_metadata:
            described = Keyed(described, lambda metadata: metadata)
        longest = _JSON_LONGER * max_batch_bytes if as_json else None
        advance = stack.enter_context(counting("producing"))
        if place.topic is None:
            one = Producer(config, store=place.store, runtime=runtime)
            producer: Producer | TopicProducer = one
            put = into_queue(one)
        else:
            many = TopicProducer(config, store=place.store, runtime=runtime)
            producer = many
            put = into_topic(many, getattr(mapping, partitioner))
        intake = Intake(
            put,
            config,
            described,
            advance,
            FRAMINGS[framing],
            longest,
            scattered=place.topic is not None,
        )
        try:
            with last_words(intake.last_words), producer:
                if files:
                    intake.take(_contents(files, max_batch_bytes - 4))
                else:
                    stdin: Any = sys.stdin.buffer
                    intake.run(stdin.read1)
            intake.settle()
        except OpenDataBufferError as error:
            with suppress(OpenDataBufferError):
                intake.settle()
            said = str(error).removesuffix(".")
            raise Failure(f"{said}. Of the input, {intake.durable_part()}.") from error
    click.echo(json.dumps(intake.durable.as_json()))


def _refuse_keys(given: dict[str, Any], url: str) -> None:
    for name, value in given.items():
        if value:
            raise click.UsageError(
                f"{name} chooses a partition, and records go to one queue of {url}: leave it out; "
                "metadata is what a queue keeps beside a record (--metadata, --metadata-from)"
            )


_JSON_LONGER = 6
"""So much longer a record may be in JSON, where it is all control characters (``\\u0000``)."""


def _contents(paths: Sequence[str], limit: int) -> Iterator[bytes]:
    for path in paths:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise InvalidInput(
                f"{path!r} has more than {limit} bytes, and is one record: raise "
                "--max-batch-bytes here and at the consumer, or give its lines to stdin"
            )
        yield data
