"""Interrupting a call at a chosen step, like Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tests.support.simulation import no_collections

Interrupt = Callable[[Callable[[], object]], None]


class _InterruptAt:
    def __init__(self, step: int, event: str) -> None:
        self._left = step
        self._event = event
        self.came = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _InterruptAt:
        frame.f_trace_opcodes = self._event == "opcode"
        if event == self._event:
            self._left -= 1
            if self._left == 0:
                self.came = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def each_step(*, least: int, opcodes: bool = False) -> Iterator[Interrupt]:
    """Yield functions that run a call with ``KeyboardInterrupt`` at step 1, 2, and so on.

    A step is a line, or with ``opcodes`` an instruction, in any function of this thread.
    There must be more than ``least``.
    """
    step, more = 0, True

    def interrupt(call: Callable[[], object]) -> None:
        nonlocal more
        before = sys.gettrace()
        tracer = _InterruptAt(step, "opcode" if opcodes else "line")
        # Python 3.12 traces instructions only of frames that ask for it before settrace().
        sys._getframe().f_trace_opcodes = opcodes
        with no_collections():
            sys.settrace(tracer)
            try:
                call()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
        # Not whether it came out of the call: the step may be in the finalizer of an earlier
        # test's object, where the interpreter reports an error and goes on.
        more = tracer.came

    while more:
        step += 1
        yield interrupt
    assert step > least
