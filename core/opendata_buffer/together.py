"""One call for each of many things at once: looks at all partitions cost the time of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TypeVar

from opendata_buffer.runtime import Runtime

__all__ = ["MOST_AT_ONCE", "together"]

MOST_AT_ONCE = 32
"""Half of the connections that a store keeps."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def together(
    runtime: Runtime,
    call: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    most: int = MOST_AT_ONCE,
) -> list[Result]:
    """``call`` of each item, in threads, within the deadline of the calling thread.

    Returns:
        The results, in the order of the items.

    Raises:
        Exception: What the first of the failed calls raised, in the order of the items; all
            others have ended by then, so none of them is still under way. A caller that wants
            to know each outcome lets ``call`` return its error.
    """
    wanted = tuple(items)
    if len(wanted) <= 1:
        return [call(each) for each in wanted]  # a thread to wait for at once is pure cost
    changed = runtime.condition()
    waiting = list(enumerate(wanted))[::-1]
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            with changed:
                if not waiting:
                    return
                index, item = waiting.pop()
            try:
                result = call(item)
            except BaseException as error:  # raised again in the caller's thread
                with changed:
                    errors[index] = error
                    changed.notify_all()
            else:
                with changed:
                    results[index] = result
                    changed.notify_all()

    for _ in range(min(most, len(wanted))):
        with changed:
            if not waiting:
                break  # a store that is near has answered all before there was a thread for each
        context = copy_context()  # one context cannot be entered twice at once
        try:
            runtime.spawn(lambda context=context: context.run(work), "opendata-buffer-together")  # type: ignore[misc]
        except RuntimeError:
            # No thread is left. Raised, it would leave calls under way that nobody waits for.
            work()
            break
    with changed:
        while len(results) + len(errors) < len(wanted):
            changed.wait()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(wanted))]
