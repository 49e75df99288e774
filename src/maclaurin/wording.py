"""Small texts that many messages need: durations, lists of names, suggestions, the first line of an error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for a word close to known ones, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def in_list(name: str) -> str:
    """The name as part of a list: in quotes if it contains a comma itself."""
    return f"“{name}”" if "," in name else name


def listed_names(names: Iterable[str]) -> str:
    """a, b, “c, d”."""
    return ", ".join(map(in_list, names))
