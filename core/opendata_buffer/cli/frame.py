"""One frame of ``top``: what a person sees of a queue or a topic at one moment. Built on rich."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opendata_buffer.admin.broker import BrokerStatus
from opendata_buffer.admin.overview import Overview, QueueLook
from opendata_buffer.admin.watch import Flow, View
from opendata_buffer.cli.terminal import format_age
from opendata_buffer.cli.words import plural, waiting

__all__ = ["frame", "sparkline"]

QUIET_S = 30.0
"""A consumer that has taken nothing for so long, with something to take, is worth a colour."""

LARGEST_WRITERS = 6
AROUND = 14
"""Lines that are not those of partitions, about."""

_BLOCKS = "▁▂▃▄▅▆▇█"
_BAR = 12
_COLUMNS = ("backlog", "", "oldest", "in", "out", "next", "consumer", "undecided")


def frame(view: View, height: int | None, width: int) -> RenderableType:
    """What to print.

    Args:
        view: What is known.
        height: Lines of the terminal: of more partitions than fit the fullest are shown. None
            shows all.
        width: Its columns: in a narrow one bars and consumers are shortened, and numbers are not.
    """
    parts: list[RenderableType] = []
    if view.failure is not None:
        parts.append(_failure(view))
    overview = view.overview
    if overview is not None:
        rows = None if height is None else max(3, height - AROUND)
        parts += [_head(view, overview), Text(), _queues(view, overview.queues, rows, width)]
        parts += [Text(), *_writers(view, overview.queues), *_aside(overview.queues)]
    return Group(*parts)


def sparkline(values: Sequence[int]) -> str:
    """The values as a row of blocks, from nothing to the largest of them."""
    largest = max(values, default=0)
    if not largest:
        return _BLOCKS[0] * len(values)
    return "".join(_BLOCKS[round(value / largest * (len(_BLOCKS) - 1))] for value in values)


def _failure(view: View) -> Text:
    seen = "" if view.overview is None else f" What follows is {format_age(view.age_seconds)} old."
    said = f"the store fails since {format_age(view.failing_seconds)}: {view.failure}{seen}"
    return Text(said, style="bold red")


def _head(view: View, overview: Overview) -> Text:
    total = view.total
    what = f"topic, {plural(len(overview.queues), 'partition')}" if overview.topic else "queue"
    text = Text.assemble((overview.store, "bold"), f"  {what}\n")
    text.append(waiting(overview.backlog), "bold cyan")
    text.append(
        f", the oldest {format_age(overview.oldest_age_seconds)} old"
        * (overview.oldest_age_seconds is not None)
    )
    text.append(f"   in {_rate(total.arriving)}   out {_rate(total.leaving)}   ")
    text.append(sparkline(view.history), "cyan")
    return text


def _queues(view: View, queues: Sequence[QueueLook], most: int | None, width: int) -> Table:
    shown = list(queues)
    if most is not None and len(shown) > most:
        fullest = sorted(shown, key=lambda each: -each.backlog)[:most]
        shown = [each for each in shown if each in fullest]
    largest = max((each.backlog for each in queues), default=0)
    rows = []
    for each in shown:
        flow = view.flows.get(each.name, Flow())
        length = round(each.backlog / largest * _BAR) if largest else 0
        rows.append(
            [
                Text(each.name + (" (drains)" if each.state != "active" else "")),
                Text(f"{each.backlog:,}"),
                Text("█" * length, "cyan"),
                Text(format_age(each.oldest_age_seconds)),
                Text(_rate(flow.arriving)),
                Text(_rate(flow.leaving)),
                Text(f"{each.next_sequence:,}"),
                _consumer(each, flow),
                Text(f"{each.undecided:,}" if each.undecided else "-"),
            ]
        )
    names = ["partition" if len(queues) > 1 else "queue", *_COLUMNS]
    _shorten(rows, names, width)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        left = name in (names[0], "", "consumer")
        table.add_column(
            name,
            justify="left" if left else "right",
            no_wrap=True,
            style="cyan" if name == names[0] else "",
        )
    for row in rows:
        table.add_row(*row)
    if len(shown) < len(queues):
        rest = [each for each in queues if each not in shown]
        wait = sum(each.backlog for each in rest)
        table.add_row(Text(f"and {len(rest):,} more", "dim"), Text(f"{wait:,}", "dim"))
    return table


def _shorten(rows: Sequence[Sequence[Text]], names: Sequence[str], width: int) -> None:
    """Let bars and consumers have what the other columns leave of the width."""
    widest = {
        name: max([len(name), *(each.cell_len for each in column)])
        for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }
    spare = width - 2 * (len(names) - 1) - sum(widest.values())
    for name, least in (("", 1), ("consumer", len("consumer"))):
        at, room = names.index(name), max(least, widest[name] + min(0, spare))
        spare += widest[name] - room
        for row in rows:
            row[at].truncate(room, overflow="ellipsis" if name else "crop")


def _consumer(queue: QueueLook, flow: Flow) -> Text:
    if not queue.epoch:
        return Text("none so far", "yellow" if queue.backlog else "dim")
    text = f"epoch {queue.epoch:,}"
    if queue.holder is not None:
        holder = queue.holder
        text += f", {holder.program} on {holder.host} ({holder.process})"
    if flow.left_ago is not None:
        text += f", acknowledged {format_age(flow.left_ago)} ago"
    old = queue.oldest_age_seconds or 0.0
    is_quiet = flow.left_ago is None or flow.left_ago > QUIET_S
    return Text(text, "yellow" if queue.backlog and is_quiet and old > QUIET_S else "")


def _writers(view: View, queues: Sequence[QueueLook]) -> list[Text]:
    waiting: dict[str, int] = {}
    for queue in queues:
        for writer, batches in queue.writers.items():
            waiting[writer] = waiting.get(writer, 0) + batches
    if not view.writers:
        return []
    found = sorted(view.writers, key=lambda name: (-waiting.get(name, 0), view.writers[name], name))

    def told(name: str) -> str:
        if name in waiting:
            return f"{name} ({waiting[name]:,} wait)"
        return f"{name} ({format_age(view.writers[name])} ago)"

    said = ", ".join(map(told, found[:LARGEST_WRITERS]))
    if len(found) > LARGEST_WRITERS:
        said += f", and {len(found) - LARGEST_WRITERS:,} more"
    return [Text.assemble((f"producers {len(found):,}: ", "dim"), said)]


def _aside(queues: Sequence[QueueLook]) -> list[Text]:
    """Brokers, claims and notes: a line each, where there are any."""
    found = []
    for each in queues:
        name = f"{each.name}: " if len(queues) > 1 else ""
        if each.broker is not None and each.broker.address:
            found.append(Text.assemble((f"broker {name}", "dim"), _broker(each.broker)))
        if each.claims is not None and (each.claims.held or each.claims.done):
            said = (
                f"{plural(each.claims.held, 'batch')} held, {each.claims.done:,} done out of order"
            )
            found.append(Text.assemble((f"workers {name}", "dim"), said))
        found += [Text(f"note: {name}{note}", "yellow") for note in each.notes]
    return found


def _broker(broker: BrokerStatus) -> Text:
    if broker.alive is None:
        return Text(f"{broker.address}, not asked")
    if not broker.alive:
        return Text(f"{broker.address}, DEAD or not reached: {broker.reason}", "bold red")
    return Text(
        f"{broker.address}, term {broker.term:,}, {broker.clients or 0:,} clients, "
        f"{broker.waiting or 0:,} entries wait, {broker.group_size or 0:.1f} entries a write, "
        f"{broker.conflicts or 0:,} conflicts"
    )


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.1f}/s"
