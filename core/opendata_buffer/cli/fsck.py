"""Check a queue and mend it: ``fsck``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from opendata_buffer.cli.asking import confirm, yes_option
from opendata_buffer.cli.errors import Failure
from opendata_buffer.cli.options import (
    allow_foreign_option,
    json_option,
    max_batch_bytes_option,
    queue_options,
    queue_words,
)
from opendata_buffer.cli.words import plural

if TYPE_CHECKING:
    from opendata_buffer.admin.fsck import Report
    from opendata_buffer.admin.repair import Mended, RepairPlan
    from opendata_buffer.cli.places import Place

__all__ = ["fsck"]


@click.command()
@queue_options
@max_batch_bytes_option
@allow_foreign_option
@click.option(
    "--repair",
    "mend",
    is_flag=True,
    help="Mend what is found: rebuild a manifest, pass batches by that cannot be delivered. "
    "Whatever is replaced is copied first.",
)
@click.option("--dry-run", is_flag=True, help="With --repair: only tell what would be done.")
@yes_option
@json_option
@click.pass_obj
def fsck(
    runtime: Any,
    /,
    max_batch_bytes: int,
    allow_foreign_locations: bool,
    mend: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    **queue: Any,
) -> None:
    """Check that every queued batch exists and decodes; exits 1 with a list if not.

    Prints a line for each problem and note, and how much was checked: the bytes are those of
    records, and of their objects as stored. Of a topic all partitions are checked. Nothing is
    changed without --repair. Before that stop producers and consumers; one that still reads is
    fenced. With --json a line for each queue.
    """
    from opendata_buffer.admin.fsck import check_queue
    from opendata_buffer.admin.repair import plan_repair, repair
    from opendata_buffer.cli.places import place_of
    from opendata_buffer.cli.progress import track
    from opendata_buffer.config import ConsumerConfig

    if (dry_run or yes) and not mend:
        raise click.UsageError("--dry-run and --yes are about --repair: give that, too")
    place = place_of(
        runtime,
        queue,
        ConsumerConfig,
        max_batch_bytes=max_batch_bytes,
        allow_foreign_locations=allow_foreign_locations,
    )

    def check(config: Any) -> Report:
        with track("checking") as advance:
            return check_queue(place.store, config, runtime, advance=advance)

    bad: list[tuple[Any, int]] = []
    for config in place.written(runtime):
        report = check(config)
        mended: list[Mended] | None = None
        if mend and not report.ok:
            plan = plan_repair(report)
            if not as_json:
                _show(report, None, config, place, False)
            _tell(plan, as_json)
            if dry_run or not plan.mend:
                mended = []
            else:
                what = plural(len(plan.mend), "problem")
                confirm(f"{what} of {config.data_path_prefix!r} will be mended", yes)
                with track("mending") as advance:
                    mended = repair(place.store, config, plan.mend, runtime, advance=advance)
                report = check(config)
        if as_json or mended != []:
            _show(report, mended, config, place, as_json)
        if not report.ok:
            bad.append((config, len(report.problems)))
    if bad:
        raise _problems(bad)


def _show(
    report: Report, mended: list[Mended] | None, config: Any, place: Place, as_json: bool
) -> None:
    from opendata_buffer.cli.terminal import format_bytes

    if as_json:
        fields: dict[str, Any] = report.as_json()
        if place.topic is not None:
            fields["partition"] = config.data_path_prefix
        if mended is not None:
            fields["repaired"] = [each.as_json() for each in mended]
        click.echo(json.dumps(fields))
        return
    for each in mended or ():
        what = "the manifest" if each.sequence is None else f"sequence {each.sequence}"
        copy = "there was nothing to copy" if each.copy is None else f"copied as {each.copy}"
        click.echo(f"mended {what} {each.location!r} ({each.kind}); {copy}")
    where = f"{config.data_path_prefix}: " if place.topic is not None else ""
    for finding in report.notes:
        click.echo(f"{where}note: {finding}")
    for finding in report.problems:
        click.echo(f"{where}problem: {finding}")
    click.echo(
        f"{where}{plural(report.batches, 'batch')}, {plural(report.records, 'record')} checked, "
        f"{format_bytes(report.bytes)} of records in {format_bytes(report.stored_bytes)} of objects"
    )


def _tell(plan: RepairPlan, as_json: bool) -> None:
    from opendata_buffer.admin.repair import MENDED_BY

    for finding in plan.mend:
        what = finding.what if finding.sequence is None else f"sequence {finding.sequence}"
        click.echo(f"repair: {what} {finding.location!r} {MENDED_BY[finding.kind]}", err=as_json)
    for finding, why in plan.leave:
        click.echo(
            f"not repaired: sequence {finding.sequence} {finding.location!r}: {why}", err=as_json
        )


def _problems(bad: list[tuple[Any, int]]) -> Failure:
    count = sum(number for _, number in bad)
    queues = ", ".join(repr(config.manifest_path) for config, _ in bad)
    noun = "queue" if len(bad) == 1 else "queues"
    return Failure(
        f"{plural(count, 'problem')} in the {noun} with manifest {queues}: restore the objects if "
        f"there are copies, or mend with 'opendata-buffer fsck {queue_words()} --repair', which "
        "copies what it passes by"
    )
