"""Training or testing: decided by a document's own text, whatever other documents there are."""

from __future__ import annotations

import hashlib

TRAIN, TEST = "train", "test"


def document_hash(text: str) -> bytes:
    """128 bits that stand for the text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def side_of(text: str, test_fraction: float) -> str:
    """TEST if hash(text) / 2⁶⁴ < test_fraction, else TRAIN: copies of a text are always together."""
    share = int.from_bytes(document_hash(text)[:8], "big") / 2**64
    return TEST if share < test_fraction else TRAIN
