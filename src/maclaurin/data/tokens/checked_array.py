"""A long array in several files, each block of which has a checksum that is compared on first reading.

    <name>-00000.bin, <name>-00001.bin, …   the numbers, little endian
    <name>.crc                              crc32 of each block, four bytes each

Checking blocks instead of files keeps opening instant, however much there is, and still no number is
ever used that is not the one that was written.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self, final

import numpy as np

from maclaurin.data.errors import DamagedFileError

BLOCK_BYTES = 1 << 16
BLOCKS_PER_FILE = 1 << 12


@final
@dataclass(frozen=True)
class ArrayEntry:
    """What the manifest says about an array."""

    name: str
    dtype: str
    items: int
    table_crc32: int
    block_bytes: int
    blocks_per_file: int

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """The inverse of to_plain."""
        return cls(**plain)

    def to_plain(self) -> dict[str, Any]:
        """As JSON keeps it."""
        return asdict(self)

    @property
    def bytes(self) -> int:
        """Of the numbers."""
        return self.items * np.dtype(self.dtype).itemsize

    @property
    def blocks(self) -> int:
        """Of which the last may be shorter."""
        return -(-self.bytes // self.block_bytes)

    @property
    def file_bytes(self) -> int:
        """Of every file but the last."""
        return self.block_bytes * self.blocks_per_file

    @property
    def file_sizes(self) -> dict[str, int]:
        """Every file that belongs to the array and the bytes it must have."""
        starts = range(0, self.bytes, self.file_bytes)
        sizes = {file_name(self.name, i): min(self.file_bytes, self.bytes - s) for i, s in enumerate(starts)}
        return {**sizes, f"{self.name}.crc": 4 * self.blocks}


def file_name(name: str, number: int) -> str:
    """The number-th file of an array."""
    return f"{name}-{number:05d}.bin"


@final
class ArrayWriter:
    """Takes numbers piece by piece; at most a block of them is in memory."""

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: str,
        *,
        block_bytes: int = BLOCK_BYTES,
        blocks_per_file: int = BLOCKS_PER_FILE,
    ) -> None:
        self._folder, self._name, self._dtype = folder, name, np.dtype(dtype).newbyteorder("<")
        self._block_bytes, self._blocks_per_file = block_bytes, blocks_per_file
        self._waiting = bytearray()
        self._checksums: list[int] = []
        self._bytes = 0
        self._file: BinaryIO | None = None

    @property
    def items(self) -> int:
        """Numbers taken so far."""
        return self._bytes // self._dtype.itemsize

    def append(self, numbers: np.ndarray) -> None:
        """Put these behind those that came before."""
        content = np.asarray(numbers, dtype=self._dtype).tobytes()
        self._bytes += len(content)
        self._waiting += content
        whole = len(self._waiting) - len(self._waiting) % self._block_bytes
        for start in range(0, whole, self._block_bytes):
            self._write_block(bytes(self._waiting[start : start + self._block_bytes]))
        del self._waiting[:whole]

    def finish(self) -> ArrayEntry:
        """Write what is left, flush everything to the disk, and tell what the manifest must say."""
        if self._waiting:
            self._write_block(bytes(self._waiting))
        self.close()
        table = np.asarray(self._checksums, dtype="<u4").tobytes()
        with (self._folder / f"{self._name}.crc").open("wb") as file:
            file.write(table)
            _flush(file)
        return ArrayEntry(
            self._name,
            self._dtype.str,
            self.items,
            zlib.crc32(table),
            self._block_bytes,
            self._blocks_per_file,
        )

    def close(self) -> None:
        """Let go of the open file."""
        if self._file is not None:
            _flush(self._file)
            self._file.close()
            self._file = None

    def _write_block(self, block: bytes) -> None:
        number, place = divmod(len(self._checksums), self._blocks_per_file)
        if place == 0:
            self.close()
            self._file = (self._folder / file_name(self._name, number)).open("wb")
        assert self._file is not None
        self._file.write(block)
        self._checksums.append(zlib.crc32(block))


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@final
class CheckedArray:
    """array[start:stop] from the files of a folder."""

    def __init__(self, folder: Path, entry: ArrayEntry) -> None:
        self._folder, self._entry = folder, entry
        self._dtype = np.dtype(entry.dtype)
        self._files: dict[int, np.ndarray] = {}
        self._checked = np.zeros(entry.blocks, dtype=bool)

    def __len__(self) -> int:
        return self._entry.items

    def __getitem__(self, places: slice) -> np.ndarray:
        """A copy of these numbers as int64; places beyond the end are left out, as in a list."""
        start, stop, _ = places.indices(len(self))
        size = self._dtype.itemsize
        content = self._read(start * size, max(start, stop) * size)
        return content.view(self._dtype).astype(np.int64)

    def _read(self, start: int, stop: int) -> np.ndarray:
        """The bytes start … stop−1, from checked blocks."""
        entry = self._entry
        for block in range(start // entry.block_bytes, -(-stop // entry.block_bytes)):
            if not self._checked[block]:
                self._check(block)
        parts = []
        while start < stop:
            number, place = divmod(start, entry.file_bytes)
            parts.append(self._file(number)[place : place + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def _check(self, block: int) -> None:
        number, place = divmod(block, self._entry.blocks_per_file)
        start = place * self._entry.block_bytes
        content = self._file(number)[start : start + self._entry.block_bytes]
        if zlib.crc32(content.tobytes()) != self._checksums[block]:
            raise _damaged(self._folder / file_name(self._entry.name, number), f"block {place}")
        self._checked[block] = True

    @cached_property
    def _checksums(self) -> np.ndarray:
        path = self._folder / f"{self._entry.name}.crc"
        table = path.read_bytes()
        if zlib.crc32(table) != self._entry.table_crc32:
            raise _damaged(path, "the table of checksums")
        return np.frombuffer(table, dtype="<u4")

    def _file(self, number: int) -> np.ndarray:
        if number not in self._files:
            path = self._folder / file_name(self._entry.name, number)
            self._files[number] = np.memmap(path, dtype=np.uint8, mode="r")
        return self._files[number]


def _damaged(path: Path, where: str) -> DamagedFileError:
    return DamagedFileError(
        f"{path} is damaged: {where} is not what was written. The disk or a program has changed it. "
        "Delete the file and run again: the tokens will be prepared anew."
    )
