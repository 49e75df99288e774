"""Help with typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' for a word close to a known one, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=2, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""
