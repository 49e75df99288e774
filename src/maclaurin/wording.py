"""Small texts that many messages need: durations, and the first line of an error."""

from __future__ import annotations

LONGEST_LINE = 200


def duration(seconds: float) -> str:
    """41 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def first_line(problem: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:LONGEST_LINE]
