"""Model sizes as data. `small` and `large` are the paper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError, did_you_mean


@final
@dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a Llama-2 stack; the vocabulary belongs to the tokenizer."""

    name: str
    hidden: int
    ffn: int
    heads: int
    layers: int
    length: int
    note: str = ""


SIZES = {
    size.name: size
    for size in (
        Size("pico", 64, 172, 2, 2, 128, "0.16M with a vocabulary of 512: seconds on one core"),
        Size("nano", 128, 344, 4, 4, 256, "about 1M with a small vocabulary, for a CPU"),
        Size("micro", 256, 688, 4, 6, 512, "about 7M at a vocabulary of 4096"),
        Size("mini", 384, 1024, 6, 6, 512, "13.8M at a vocabulary of 4096; minutes on one GPU"),
        Size("small", 1024, 2048, 16, 20, 1024, "275M at a vocabulary of 32000, as in the paper"),
        Size("large", 3072, 6144, 16, 20, 1024, "2.08B at a vocabulary of 32000, as in the paper"),
    )
}


def size_named(name: str) -> Size:
    """The size of that name, or an error with the known ones."""
    if name not in SIZES:
        raise InputError(
            f"there is no size {name!r}; known are {', '.join(SIZES)}." + did_you_mean(name, list(SIZES))
        )
    return SIZES[name]
