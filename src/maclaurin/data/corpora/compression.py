"""Files that may be compressed, read as a stream: plain, .gz, .xz and .zst."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast, final

from maclaurin.data.errors import DataError
from maclaurin.data.extra import load_extra

COMPRESSIONS = (".gz", ".xz", ".zst")
_CHUNK = 1 << 18


@contextmanager
def open_stream(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(decompressed bytes, the file itself, whose position tells the progress)."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                yield cast("BinaryIO", gzip.GzipFile(fileobj=raw)), raw
            elif path.suffix == ".xz":
                yield cast("BinaryIO", lzma.open(raw)), raw
            elif path.suffix == ".zst":
                yield io.BufferedReader(_Zstandard(raw), _CHUNK), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError) as problem:
        raise DataError(
            f"{path} is not a whole compressed file ({problem}). Fetch it again or leave it out."
        ) from None


@final
class _Zstandard(io.RawIOBase):
    """Zstandard frames one after the other; unlike the library's own stream, it notices a missing end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._library = load_extra("zstandard", "reading .zst files", "use .gz")
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._rest_of_frame() or self._raw.read(_CHUNK)
            if not compressed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("the last zstandard frame has no end")
                return 0
            self._decompress(compressed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _rest_of_frame(self) -> bytes:
        return self._frame.unused_data if self._frame is not None and self._frame.eof else b""

    def _decompress(self, compressed: bytes) -> None:
        if self._frame is None or self._frame.eof:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(compressed)
        except self._library.ZstdError as problem:
            raise EOFError(str(problem)) from None
