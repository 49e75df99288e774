"""The prepared tokens of a corpus: a manifest, and one long array for each split.

    ⟨sep⟩ d₁ ⟨sep⟩ d₂ … ⟨sep⟩ d_n ⟨sep⟩

The separator opens every document, so that its first token has something to be predicted from, and the
next one closes it, so that its end is predicted too. A second array holds where the documents begin,
and the place after the last one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.data.cache.whole_file import write_whole_file
from maclaurin.data.fingerprint import digest
from maclaurin.data.tokens.checked_array import ArrayEntry, CheckedArray

MANIFEST = "manifest.json"
VERSION = 2


@final
class Documents:
    """Tokenized documents one after the other."""

    def __init__(self, tokens: CheckedArray, starts: CheckedArray) -> None:
        self.tokens, self.starts = tokens, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def at(self, place: int) -> int:
        """The number of the document that the token at this place belongs to."""
        low, high = 0, len(self)
        while high - low > 1:
            middle = (low + high) // 2
            if self.starts[middle : middle + 1][0] <= place:
                low = middle
            else:
                high = middle
        return low


@final
@dataclass(frozen=True)
class Manifest:
    """What is in the folder, and from what it was made."""

    made_from: dict[str, Any]
    vocab_size: int
    arrays: dict[str, ArrayEntry]

    def write(self, folder: Path) -> None:
        """As the last file, so that a folder with a manifest is complete."""
        plain = {
            "version": VERSION,
            "made_from": self.made_from,
            "vocab_size": self.vocab_size,
            "arrays": {name: entry.to_plain() for name, entry in self.arrays.items()},
        }
        text = json.dumps({**plain, "digest": digest(plain)}, indent=1)
        write_whole_file(folder / MANIFEST, text.encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """The manifest if it is there, undamaged and of this version."""
        try:
            plain = json.loads((folder / MANIFEST).read_bytes())
            if plain.pop("digest") != digest(plain) or plain["version"] != VERSION:
                return None
            arrays = {name: ArrayEntry.from_plain(entry) for name, entry in plain["arrays"].items()}
            return cls(plain["made_from"], plain["vocab_size"], arrays)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def documents(self, folder: Path, side: str) -> Documents:
        """The documents of one side of the split."""
        return Documents(
            CheckedArray(folder, self.arrays[f"{side}-tokens"]),
            CheckedArray(folder, self.arrays[f"{side}-starts"]),
        )


def is_whole_for(made_from: dict[str, Any]) -> Callable[[Path], bool]:
    """A test of folders: made from just this, with every file there in its full size."""

    def is_whole(folder: Path) -> bool:
        manifest = Manifest.read(folder)
        if manifest is None or manifest.made_from != made_from:
            return False
        sizes = [item for entry in manifest.arrays.values() for item in entry.file_sizes.items()]
        return all(_size(folder / name) == size for name, size in sizes)

    return is_whole


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
