"""The configuration of a run's data, and the source it describes. Accepted texts:

stdlib | stdlib:tests | path[:field] | hf:NAME[:CONFIG][@SPLIT] | fineweb | slimpajama | pile
mqar:pairs=8,vocab=256 | induction | copy | state | parity
bytes | bpe:N | hf:NAME_OR_PATH
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final, get_type_hints

from maclaurin.data.cache_folder import Cache
from maclaurin.data.corpus import Corpus, FirstDocuments, StandardLibrary
from maclaurin.data.hub_dataset import HubDataset
from maclaurin.data.recall_rows import MixedRows
from maclaurin.data.source import Source
from maclaurin.data.splits import (
    TEST,
    CorpusSplitter,
    DocumentSplitter,
    Fractions,
    Splitter,
    usual_fraction,
)
from maclaurin.data.tasks import Induction, Recall, SelectiveCopy, StateTracking, Task, TaskSource
from maclaurin.data.text_files import Files
from maclaurin.data.text_source import LAYOUTS, TextSource
from maclaurin.data.text_tokenizers import Bytes, Tokenizer, open_byte_pairs, open_hub_tokenizer
from maclaurin.data.token_shards import prepare_tokens
from maclaurin.errors import DataError
from maclaurin.wording import did_you_mean


@final
@dataclass(frozen=True)
class DataConfig:
    """Everything that determines what a model is trained, validated and tested on.

    data                 stdlib | stdlib:tests | path[:field] | hf:NAME[:CONFIG][@SPLIT] | fineweb |
                         slimpajama | pile | mqar | induction | copy | parity | state, tasks with options:
                         mqar:pairs=8,vocab=256,queries=8,distance=0.01,length=128
    tokenizer            bytes | bpe:N | hf:NAME_OR_PATH; tasks need none
    length               tokens of a row; a task's own length=… overrides it
    rows                 packed: documents one after the other, cut to length;
                         documents: one document per row, cut at length and padded (as in the paper)
    cross_documents      whether attention may cross documents of a row; False fills Batch.documents
    validation_fraction  share of documents, by their hash, for evaluation during training and for choices;
                         None: 0.1 of stdlib, which has few documents, and 0.02 of anything else
    test_fraction        share of documents, by their hash, for the final evaluation only; None: the same
    seed                 order of the training rows, content of tasks
    mix                  share of training rows with facts and questions, or repeated passages, in their text
    reach                with mix: largest distance of facts to their questions; None: the length
    limit_documents      use only this many first documents of the corpus
    cache                folder for tokens and tokenizers; None: $MACLAURIN_CACHE or ~/.cache/maclaurin
    """

    data: str = "stdlib"
    tokenizer: str = "bpe:4096"
    length: int = 256
    rows: str = "packed"
    cross_documents: bool = True
    validation_fraction: float | None = None
    test_fraction: float | None = None
    seed: int = 0
    mix: float = 0.0
    reach: int | None = None
    limit_documents: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise DataError("data is empty: name a source of data; data=stdlib works on every machine.")
        if self.length < 1:
            raise DataError(f"length={self.length} leaves no token in a row. Use length=1 or more.")
        if self.rows not in LAYOUTS:
            raise DataError(
                f"rows={self.rows!r} is not a layout of rows; layouts are {' and '.join(LAYOUTS)}."
                f"{did_you_mean(self.rows, LAYOUTS)}"
            )
        fractions = self.fractions  # checks both
        if not fractions.validation > 0:
            raise DataError(
                f"validation_fraction={fractions.validation:g} leaves nothing to evaluate on during "
                f"training; {usual_fraction(self.data):g} is usual."
            )
        if self.limit_documents is not None and self.limit_documents < 1:
            raise DataError(
                f"limit_documents={self.limit_documents} leaves no document. Use 1 or more, or None for all."
            )

    @property
    def fractions(self) -> Fractions:
        """The shares of documents that are held out."""
        usual = usual_fraction(self.data)
        given = (self.validation_fraction, self.test_fraction)
        return Fractions(*(usual if fraction is None else fraction for fraction in given))


def open_source(config: DataConfig, *, progress: bool = True) -> Source:
    """Open the source; text that is not in the cache is tokenized first."""
    if is_task(config.data):
        if config.mix:
            raise DataError(
                f"{config.data} is a task, but mix puts facts into text: name a text, or use mix=0."
            )
        return TaskSource(config.data, open_task(config.data, config.length), config.seed)
    text = _open_text(config, progress)
    if not config.mix:
        return text
    return MixedRows(text, config.mix, config.reach or config.length, config.seed)


def _open_text(config: DataConfig, progress: bool) -> TextSource:
    cache = Cache.at(config.cache)
    corpus = open_corpus(
        config.data,
        limit=config.limit_documents,
        notes=cache.notes,
        other_names=TASK_NAMES,
        progress=progress,
    )
    splitter = CorpusSplitter(corpus, config.fractions)
    tokenizer = open_tokenizer(config.tokenizer, corpus, splitter, cache.tokenizers, progress=progress)
    prepared = prepare_tokens(corpus, tokenizer, splitter, cache, progress=progress)
    return TextSource(
        corpus.name,
        tokenizer,
        prepared,
        config.length,
        config.rows,
        config.cross_documents,
        config.seed,
        corpus.description,
    )


def stdlib_test_documents() -> Iterator[str]:
    """The files of the standard library that a run on `stdlib` with the usual fractions only tests on."""
    library = StandardLibrary()
    splitter = DocumentSplitter(DataConfig().fractions, library.longest_held_out)
    return (d.text for d in library.documents() if splitter.split_of(d.text) == TEST)


Options = TypeVar("Options")

PRESETS: dict[str, str] = {
    # the crawl of December 2024
    "fineweb": "hf:HuggingFaceFW/fineweb:CC-MAIN-2024-51",
    "slimpajama": "hf:cerebras/SlimPajama-627B",
    # the Pile without its copyrighted parts; hf:EleutherAI/the_pile_deduplicated is the other choice
    "pile": "hf:monology/pile-uncopyrighted",
}
"""Short names of large public data sets: `limit_documents` says how many documents to take."""

TASKS: dict[str, type[Task]] = {
    task.notation: task for task in (Recall, Induction, SelectiveCopy, StateTracking)
}
SHORT_NAMES: dict[str, tuple[str, dict[str, str]]] = {"parity": ("state", {"group": "Z2"})}
TASK_NAMES = (*TASKS, *SHORT_NAMES)


def open_corpus(
    written: str, *, limit: int | None, notes: Path, other_names: Iterable[str] = (), progress: bool = True
) -> Corpus:
    """The corpus, or its first `limit` documents; errors suggest `other_names` too."""
    corpus = _corpus_named(PRESETS.get(written, written), notes, [*other_names], progress)
    return corpus if limit is None else FirstDocuments(corpus, limit)


def _corpus_named(written: str, notes: Path, other_names: list[str], progress: bool) -> Corpus:
    kind, _, rest = written.partition(":")
    if kind == "stdlib" and rest in ("", "tests"):
        return StandardLibrary(with_tests=rest == "tests")
    if kind == "hf":
        return HubDataset.named(rest, notes, progress)
    files = Files.named(written, notes, progress)
    if not files.root.exists():
        known = ["stdlib", "stdlib:tests", *PRESETS, *other_names]
        raise DataError(
            f"there is no data called {written!r}: it is neither a path that exists nor one of "
            f"{', '.join(known)} nor hf:NAME.{did_you_mean(kind, known)}"
        )
    return files


def require_data(written: str) -> None:
    """Raise if no data has this name; nothing is read."""
    if not is_task(written):
        open_corpus(written, limit=None, notes=Path(), other_names=TASK_NAMES, progress=False)


def is_task(written: str) -> bool:
    """Whether this names a task."""
    return written.partition(":")[0] in TASK_NAMES


def open_task(written: str, length: int) -> Task:
    """The task with its options; an option length=… overrides `length`."""
    name, values = _split_options(written)
    notation, preset = SHORT_NAMES.get(name, (name, {}))
    return _read_options(TASKS[notation], name, {"length": str(length), **preset, **values})


def open_tokenizer(
    written: str, corpus: Corpus, splitter: Splitter, folder: Path, *, progress: bool = True
) -> Tokenizer:
    """The tokenizer; bpe:N is trained on the corpus's training documents."""
    kind, _, rest = written.partition(":")
    if written == "bytes":
        return Bytes()
    if kind == "bpe" and rest.isdecimal():
        return open_byte_pairs(int(rest), corpus, splitter, folder, progress=progress)
    if kind == "hf":
        return open_hub_tokenizer(rest)
    raise DataError(
        f"there is no tokenizer {written!r}; it is bytes, bpe:N (such as bpe:4096) or hf:NAME_OR_PATH."
        f"{did_you_mean(kind, ['bytes', 'bpe:4096', 'hf:NAME_OR_PATH'])}"
    )


def _split_options(written: str) -> tuple[str, dict[str, str]]:
    """`name:a=1,b=2` → (name, {a: 1, b: 2})."""
    name, _, rest = written.partition(":")
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise DataError(f"in {written!r}, {part!r} is not an option; options are written name=value.")
        if key in values:
            raise DataError(f"in {written!r}, {key} is given twice.")
        values[key] = value
    return name, values


def _read_options(kind: type[Options], name: str, values: Mapping[str, str]) -> Options:
    """The dataclass with these fields, each read by its type: int, float or str."""
    hints = get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in known:
            raise DataError(
                f"{name} has no option {key!r}; it has {', '.join(known)}.{did_you_mean(key, known)}"
            )
    return kind(**{key: _read(hints[key], name, key, text) for key, text in values.items()})


def _read(hint: Any, name: str, key: str, text: str) -> int | float | str:
    if hint is str:
        return text
    number = float if hint is float else int
    try:
        return number(text)
    except ValueError:
        expected = "a number" if number is float else "an integer"
        raise DataError(f"{name}: {key} must be {expected}, not {text!r}.") from None
