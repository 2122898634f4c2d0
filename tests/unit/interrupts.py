"""Interrupts a call at a chosen step, as Ctrl-C may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class _InterruptAt:
    def __init__(self, step: int, event: str) -> None:
        self._left = step
        self._event = event

    def __call__(self, frame: FrameType, event: str, arg: Any) -> _InterruptAt:
        frame.f_trace_opcodes = self._event == "opcode"
        if event == self._event:
            self._left -= 1
            if self._left == 0:
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
    sys.settrace(_InterruptAt(step, "opcode" if opcodes else "line"))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
