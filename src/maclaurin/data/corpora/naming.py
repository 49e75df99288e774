"""From what the user calls it to the corpus: stdlib, hf:…, or a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from maclaurin.data.corpora.corpus import Corpus, FirstDocuments
from maclaurin.data.corpora.files import Files
from maclaurin.data.corpora.hub import HubDataset
from maclaurin.data.corpora.presets import PRESETS
from maclaurin.data.corpora.stdlib import StandardLibrary
from maclaurin.data.errors import DataError
from maclaurin.errors import did_you_mean


def open_corpus(
    written: str, *, limit: int | None, memory: Path, other_names: Iterable[str] = (), progress: bool = True
) -> Corpus:
    """The corpus, or its first `limit` documents; `other_names` are suggested too if there is none."""
    corpus = _named(PRESETS.get(written, written), memory, [*other_names], progress)
    return corpus if limit is None else FirstDocuments(corpus, limit)


def _named(written: str, memory: Path, other_names: list[str], progress: bool) -> Corpus:
    kind, _, rest = written.partition(":")
    if kind == "stdlib" and rest in ("", "tests"):
        return StandardLibrary(with_tests=rest == "tests")
    if kind == "hf":
        return HubDataset.named(rest, memory, progress)
    files = Files.named(written, memory, progress)
    if not files.root.exists():
        known = ["stdlib", "stdlib:tests", *PRESETS, *other_names]
        raise DataError(
            f"there is no data called {written!r}: it is neither a path that exists nor one of "
            f"{', '.join(known)} nor hf:NAME.{did_you_mean(kind, known)}"
        )
    return files
