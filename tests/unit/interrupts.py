"""Interrupts a call at a chosen step, as Ctrl-C may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.simulation import no_collections


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


def interrupted(call: Callable[[], object], step: int, *, opcodes: bool = False) -> bool:
    """Run ``call`` with ``KeyboardInterrupt`` at one of its steps, in whichever function.

    Args:
        call: Runs in this thread; others are left alone.
        step: Which step, from 1.
        opcodes: Count the interpreter's instructions and not lines.

    Returns:
        False when the call ended before that step.
    """
    before = sys.gettrace()
    interrupt = _InterruptAt(step, "opcode" if opcodes else "line")
    # Python 3.12 traces no instructions but those of frames that ask for it before settrace().
    sys._getframe().f_trace_opcodes = opcodes
    with no_collections():
        sys.settrace(interrupt)
        try:
            call()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
    # Not whether it came out of the call: the step may be in the finalizer of an earlier test's
    # object, where the interpreter reports an error and goes on.
    return interrupt.came
