"""A fingerprint is the digest of everything that decides some numbers, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(plain: Any) -> str:
    """sha256 of plain data (numbers, strings, lists, dicts) in one canonical spelling, in hex."""
    spelling = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(spelling.encode()).hexdigest()
