"""Decide when to look at an idle queue again.

Looking costs a request, whether something has come or not, and a record that comes between two
looks waits for the second one. So a reader that finds nothing looks often at first, and then more
and more rarely. Each pause is a fifth of the time since the queue was first found empty, and at
least a tenth of a second. The setting ``idle_poll_ms`` bounds how long a record waits::

    nothing for            0.5 s     1 s     5 s     10 s     an hour
    pause                  0.1 s     0.2 s   1 s     1.85 s   1.85 s      with idle_poll_ms=2000

So a record after a silence waits at most a fifth of that silence, and a queue that is never empty
for long is read as often as before. An idle hour takes about 1,900 looks.
"""

from __future__ import annotations

FIRST_PAUSE_S = 0.1
"""Shortest pause in seconds, after the first look that found nothing."""

_PART = 5
"""A pause is this part of the time for which the queue has been empty."""

_LOOKS = 1.5
"""A record that was just missed waits from the middle of one look to the end of the next one. Where
a look has two requests, the first one alone shows that nothing has come, so it counts a bit more.
"""


class PollPace:
    """The pauses between the looks of one reader. It reads no clock, and is not thread-safe.

    Args:
        most_ms: Within this time a record is found, in milliseconds, while looks take as long as
            the last one.
        first_s: The shortest pause, in seconds.
    """

    def __init__(self, most_ms: int, first_s: float = FIRST_PAUSE_S) -> None:
        self._most_s = most_ms / 1000
        self._first_s = min(first_s, self._most_s)
        self._empty_since: float | None = None
        self.pause_s = 0.0
        """Seconds from the end of the last look to the next one; 0 if it found something."""

    def looked(self, found: bool, began: float, ended: float) -> None:
        """Note the result of a look.

        Args:
            found: Whether there was anything.
            began: When it began, in monotonic seconds.
            ended: When it ended.
        """
        if found:
            self._empty_since, self.pause_s = None, 0.0
            return
        if self._empty_since is None:
            self._empty_since = ended
        took_s = ended - began
        longest_s = self._most_s - (1 + _LOOKS) * took_s
        wanted_s = min((ended - self._empty_since) / _PART, longest_s)
        self.pause_s = max(self._first_s, wanted_s)
