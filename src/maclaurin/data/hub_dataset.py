"""A data set of the Hugging Face hub, or a local folder in any format of `datasets`, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from maclaurin.data.cache_folder import file_hashes
from maclaurin.data.corpus import Corpus, Document
from maclaurin.data.text_files import text_or_error
from maclaurin.errors import DataError, load_extra
from maclaurin.plain_data import digest, read_json, write_json
from maclaurin.wording import first_line

FIELD = "text"


@final
@dataclass(frozen=True)
class HubDataset(Corpus):
    """The column `text` of a data set, in the order of its stream.

    The revision of a hub data set is looked up once and kept in the cache. Later runs read the same data,
    and need no network once its tokens are in the cache.
    """

    path: str
    config: str | None
    split: str
    notes: Path  # folder for revisions, file hashes and the files of `datasets`
    progress: bool = True

    @classmethod
    def named(cls, written: str, notes: Path, progress: bool = True) -> HubDataset:
        """`name_or_folder[:config][@split]`, as in HuggingFaceFW/fineweb:CC-MAIN-2024-51@train."""
        rest, _, split = written.partition("@")
        path, _, config = rest.partition(":")
        if not path:
            raise DataError(f"hf:{written} names no data set; use hf:NAME, hf:NAME:CONFIG or hf:/folder.")
        if path[0] in "./~" and not Path(path).expanduser().is_dir():
            raise DataError(f"there is no folder {path}; hf:{written} would be read from it.")
        return cls(path, config or None, split or "train", notes, progress)

    @property
    def name(self) -> str:
        """The name the user gave, with the split."""
        return f"hf:{self.path}{f':{self.config}' if self.config else ''}@{self.split}"

    def _identity(self) -> dict[str, Any]:
        """Name and revision on the hub, or the folder's files and their names."""
        source = self._files if self._is_local else {"name": self.path, "revision": self._revision}
        return {"kind": "hub", "source": source, "config": self.config, "split": self.split}

    def documents(self) -> Iterator[Document]:
        """Stream the rows."""
        for number, row in enumerate(self._stream(), start=1):
            if FIELD not in row:
                raise DataError(f"{self.name} has no column {FIELD!r}; it has {', '.join(row)}.")
            text = text_or_error(row[FIELD], FIELD, f"{self.name}, row {number}")
            if text.strip():
                yield Document.of(text, None)

    @property
    def _is_local(self) -> bool:
        return Path(self.path).expanduser().is_dir()

    @cached_property
    def _files(self) -> list[list[str]]:
        root = Path(self.path).expanduser()
        paths = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith("."))
        hashes = file_hashes(paths, self.notes, progress=self.progress)
        names = [path.relative_to(root).as_posix() for path in paths]
        return [[name, value] for name, value in zip(names, hashes, strict=True)]

    @cached_property
    def _revision(self) -> str:
        note = self.notes / f"{digest(self.path)[:32]}.revision.json"
        if known := read_json(note):
            return known["revision"]
        revision = self._current_revision()
        write_json(note, {"name": self.path, "revision": revision}, indent=None)
        return revision

    def _current_revision(self) -> str:
        hub = load_extra("huggingface_hub", "data", "reading data sets of the Hugging Face hub", _INSTEAD)
        try:
            return hub.HfApi().dataset_info(self.path, timeout=20).sha
        except hub.errors.RepositoryNotFoundError:
            raise DataError(
                f"the Hugging Face hub has no data set {self.path!r}, or you have no access to it. "
                "Check the name; for a private or gated one, log in with `hf auth login`."
            ) from None
        except Exception as problem:  # the hub's client passes on errors of several HTTP libraries
            raise self._unreachable(problem) from problem

    def _stream(self) -> Iterator[dict[str, Any]]:
        datasets = load_extra("datasets", "data", "streaming data sets of the Hugging Face hub", _INSTEAD)
        revision = None if self._is_local else self._revision
        path = str(Path(self.path).expanduser()) if self._is_local else self.path
        try:
            yield from datasets.load_dataset(
                path,
                name=self.config,
                split=self.split,
                revision=revision,
                streaming=True,
                cache_dir=str(self.notes / "datasets"),
            )
        except (ValueError, datasets.exceptions.DatasetsError) as problem:
            raise DataError(f"{self.name} cannot be opened: {problem}") from problem
        except OSError as problem:
            raise self._unreachable(problem) from problem

    def _unreachable(self, problem: Exception) -> DataError:
        return DataError(
            f"{self.name} could not be read from the Hugging Face hub "
            f"({type(problem).__name__}: {first_line(problem)}). "
            "Check the network, or give a folder with its files: data=hf:/path/to/folder. "
            "data=stdlib needs no network."
        )


_INSTEAD = "download its files and give their folder: data=/path/to/folder"
