"""The configuration of a run's data, and the source it describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.data.cache_folder import Cache
from maclaurin.data.data_errors import DataError
from maclaurin.data.named import TASK_NAMES, is_task, open_corpus, open_task, open_tokenizer
from maclaurin.data.source import Source
from maclaurin.data.splits import CorpusSplitter, Fractions
from maclaurin.data.task_source import TaskSource
from maclaurin.data.text_source import LAYOUTS, TextSource
from maclaurin.data.token_shards import prepare_tokens
from maclaurin.errors import did_you_mean


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
    validation_fraction  share of documents, by their hash, for evaluation during training and for choosing
    test_fraction        share of documents, by their hash, for the final number only
    seed                 order of the training rows, content of tasks
    limit_documents      only the first so many documents of the corpus
    cache                folder for tokens and tokenizers; None: $MACLAURIN_CACHE or ~/.cache/maclaurin
    """

    data: str = "stdlib"
    tokenizer: str = "bpe:4096"
    length: int = 256
    rows: str = "packed"
    cross_documents: bool = True
    validation_fraction: float = 0.02
    test_fraction: float = 0.02
    seed: int = 0
    limit_documents: int | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise DataError("data is empty; data=stdlib works on every machine.")
        if self.length < 1:
            raise DataError(f"length={self.length} leaves no token in a row. Use length=1 or more.")
        if self.rows not in LAYOUTS:
            raise DataError(
                f"rows={self.rows!r} is not a layout of rows; known are {' and '.join(LAYOUTS)}."
                f"{did_you_mean(self.rows, LAYOUTS)}"
            )
        if not self.validation_fraction > 0:
            raise DataError(
                f"validation_fraction={self.validation_fraction:g} leaves nothing to evaluate on during "
                "training; 0.02 is usual."
            )
        _ = self.fractions  # checks both
        if self.limit_documents is not None and self.limit_documents < 1:
            raise DataError(
                f"limit_documents={self.limit_documents} leaves no document. Use 1 or more, or None for all."
            )

    @property
    def fractions(self) -> Fractions:
        """The shares of documents that are held out."""
        return Fractions(self.validation_fraction, self.test_fraction)


def open_source(config: DataConfig, *, progress: bool = True) -> Source:
    """Open the source; text that is not in the cache is tokenized first."""
    if is_task(config.data):
        return TaskSource(config.data, open_task(config.data, config.length), config.seed)
    return _open_text(config, progress)


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
    )
