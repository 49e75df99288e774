"""The data of a run: prepared by one process for all, then prefetched in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, final

import torch

from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.data.source import Batch, Source
from maclaurin.training.config import TrainConfig
from maclaurin.training.model import row_length
from maclaurin.training.processes import Processes

#: batches prepared ahead of the current one
AHEAD = 2


def data_config(config: TrainConfig) -> DataConfig:
    """The settings of a run that its data depend on."""
    return DataConfig(
        data=config.data,
        tokenizer=config.tokenizer,
        length=row_length(config),
        rows=config.rows,
        cross_documents=config.cross_documents,
        limit_documents=config.limit_documents,
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
        seed=config.seed,
        mix=config.mix,
        reach=config.reach,
    )


def open_data(config: TrainConfig, processes: Processes) -> Source:
    """The first process tokenizes into the cache, without a time limit; the others then read from it."""
    if processes.is_first:
        source = open_source(data_config(config))
        processes.wait_for_preparation()
        return source
    processes.wait_for_preparation()
    return open_source(data_config(config), progress=False)


@final
@dataclass(frozen=True)
class StepBatch:
    """This process's share of the batch of one step, split into the accumulated parts."""

    parts: list[Batch]
    scored: int

    @classmethod
    def of(cls, source: Source, step: int, config: TrainConfig, processes: Processes) -> StepBatch:
        """The batch of a step; it depends only on seed and step."""
        whole = source.train_batch(step, config.batch_size, rank=processes.rank, world=processes.world)
        size = whole.tokens.shape[0] // config.accumulate
        cuts = [slice(i, i + size) for i in range(0, whole.tokens.shape[0], size)]
        scored, documents, answers = whole.scored, whole.documents, whole.answers
        if answers is not None:  # their mean loss counts `answer_weight` times that of all tokens
            answers = answers * (config.answer_weight * scored / max(1.0, float(answers.sum())))
        parts = [
            Batch(
                whole.tokens[cut],
                whole.targets[cut],
                None if documents is None else documents[cut],
                None if answers is None else answers[cut],
                None if answers is None else answers[cut].flatten().nonzero()[:, 0],
            )
            for cut in cuts
        ]
        return cls(parts, scored)

    def pinned(self) -> StepBatch:
        """The batch in page-locked memory, for asynchronous copies to a GPU."""
        return StepBatch([_pinned(part) for part in self.parts], self.scored)

    def to(self, device: torch.device) -> StepBatch:
        """The batch on the device; from pinned memory this does not wait for the copy."""
        return StepBatch([part.to(device, non_blocking=True) for part in self.parts], self.scored)


def _pinned(batch: Batch) -> Batch:
    return Batch(*(None if part is None else part.pin_memory() for part in batch.tensors))  # type: ignore[arg-type]


@final
class Prefetch:
    """Values of make(first), make(first + 1), … up to `end`, computed in advance by one thread, in order."""

    def __init__(self, make: Callable[[int], StepBatch], first: int, end: int) -> None:
        self._make, self._range = make, range(first, end)
        self._ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread, also in the middle of a run."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue
        self._thread.join()

    def take(self) -> StepBatch:
        """The next batch; an error of the thread is raised here."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        for step in self._range:
            if self._closed.is_set():
                return
            try:
                self._ready.put(self._make(step))
            except Exception as problem:
                self._ready.put(problem)
                return
