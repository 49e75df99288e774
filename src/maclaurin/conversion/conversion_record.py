"""conversion.json: the changes of a conversion, the choice of its memory, and its cost on sample text."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

import maclaurin
from maclaurin.conversion.fact_questions import recall_over
from maclaurin.conversion.measure import Gap, Measure, perplexities
from maclaurin.conversion.memory_budget import Memory, MemoryBudget
from maclaurin.conversion.recover import Recovery
from maclaurin.conversion.sample_text import tokens_of
from maclaurin.errors import InputError
from maclaurin.plain_data import read_record, write_json

FILE_NAME = "conversion.json"
SCHEMA = 1
#: rows and tokens of the text that key offsets are calibrated on
CALIBRATION_ROWS, CALIBRATION_LENGTH = 4, 1024


@final
@dataclass(frozen=True)
class SampleSettings:
    """The text and the questions of all measures of one conversion, so that they can be compared.

    text        file; None for the test documents of stdlib
    lengths     at which perplexity is measured, on about `tokens` tokens each
    distances   at which recall is measured, with `questions` each

    Measures use the text after the first `calibration_tokens`, which are for calibration and choosing.
    """

    text: str | None = None
    lengths: tuple[int, ...] = (1024,)
    tokens: int = 2048
    distances: tuple[int, ...] = ()
    questions: int = 200
    calibration_tokens: int = CALIBRATION_LENGTH * CALIBRATION_ROWS

    def calibration(self, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor]:
        """Tokens to calibrate on, and the tokens after them to measure on."""
        first = self.calibration_tokens
        needed = first + max([self.tokens, *self.lengths])
        file = None if self.text is None else Path(self.text)
        tokens = tokens_of(tokenizer, file, needed, model.config.vocab_size)
        if tokens.numel() < 4:
            raise InputError(f"the sample text has {tokens.numel()} tokens: too few to measure anything on.")
        cut = min(first, tokens.numel() // 2)
        return tokens[:cut], tokens[cut:]

    def measures(self, model: Any, tokenizer: Any) -> tuple[Tensor, list[Measure]]:
        """Tokens to calibrate on, and measures on the tokens after them."""
        first, behind = self.calibration(model, tokenizer)
        recalls = recall_over(self.distances, tokenizer, self.questions)
        return first, [*perplexities(behind, self.lengths, self.tokens), *recalls]


@final
@dataclass(frozen=True)
class MeasuredGap:
    """A `Gap` with the share of it that is closed, and the same after training.

    recovered_tail_off     the trained model with its tail and kept keys switched off
    gap_closed_recovered   the closed share of the gap between the original and its window, both untrained
    """

    original: float
    window_only: float | None
    converted: float
    gap_closed: float | None
    recovered: float | None = None
    recovered_tail_off: float | None = None
    gap_closed_recovered: float | None = None

    @classmethod
    def of(cls, gap: Gap) -> MeasuredGap:
        """The gap before any training."""
        return cls(gap.original, gap.window_only, gap.converted, gap.closed)

    def after_training(
        self, recovered: float, tail_off: float | None, *, higher_is_better: bool
    ) -> MeasuredGap:
        """The same with the measures of the trained model."""
        closed = Gap(self.original, self.window_only, recovered, higher_is_better).closed
        return dataclasses.replace(
            self, recovered=recovered, recovered_tail_off=tail_off, gap_closed_recovered=closed
        )


@final
@dataclass(frozen=True)
class ChosenPlan:
    """The chosen plan."""

    name: str
    bytes: int
    cost: float
    error: float | None = None


@final
@dataclass(frozen=True)
class MeasuredPlan:
    """A plan on calibration text and so many questions.

    error   the standard error of its cost
    kind    how it spends memory, one of memory_page.METHODS
    """

    name: str
    bytes: int
    loss: float
    log_odds: float
    recall: float | None = None
    cost: float | None = None
    error: float | None = None
    questions: int | None = None
    kind: str = "window + kept"


@final
@dataclass(frozen=True)
class MeasuredOriginal:
    """The original on the same text and questions."""

    loss: float
    log_odds: float
    recall: float | None = None


@final
@dataclass(frozen=True)
class MemoryChoice:
    """How a memory was chosen.

    heads           numbers [layers][heads] by the name of the measure
    other_budgets   the best plans for fewer and for more bytes, if measured
    """

    budget: MemoryBudget
    plan: ChosenPlan
    original: MeasuredOriginal
    measured: tuple[MeasuredPlan, ...]
    heads: dict[str, list[list[float]]]
    other_budgets: tuple[MeasuredPlan, ...] = ()


@final
@dataclass(frozen=True)
class RecoveryRecord:
    """The training after a conversion, and the seconds of all its parts."""

    settings: Recovery
    seconds: float


@final
@dataclass(frozen=True)
class ConversionRecord:
    """The content of conversion.json.

    attention, reasons   of each layer
    memory               bytes of the cache, and of the original's
    chosen               how a memory was chosen; None if the attention was given
    perplexity, recall   by length, by distance
    measured_on          None if the caller gave the measures itself
    recovery             None without training
    """

    source: str
    attention: tuple[str, ...]
    reasons: tuple[str, ...]
    memory: Memory
    chosen: MemoryChoice | None
    perplexity: dict[int, MeasuredGap]
    recall: dict[int, MeasuredGap]
    measured_on: SampleSettings | None
    recovery: RecoveryRecord | None = None
    maclaurin: str = maclaurin.__version__
    date: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )

    def gaps(self, kind: str) -> dict[int, MeasuredGap]:
        """The measures of a kind: perplexity or recall."""
        return {"perplexity": self.perplexity, "recall": self.recall}[kind]

    def with_gap(self, measure: Measure, found: MeasuredGap) -> ConversionRecord:
        """The same with this result of a measure."""
        changed: dict[str, Any] = {measure.kind: {**self.gaps(measure.kind), measure.at: found}}
        return dataclasses.replace(self, **changed)

    def with_training(self, settings: Recovery, seconds: float) -> ConversionRecord:
        """The same after more seconds of training."""
        before = 0.0 if self.recovery is None else self.recovery.seconds
        return dataclasses.replace(self, recovery=RecoveryRecord(settings, round(before + seconds, 1)))

    def write(self, folder: Path) -> None:
        """Replace conversion.json in this folder."""
        write_json(folder / FILE_NAME, self, SCHEMA)


def read_conversion(folder: Path) -> ConversionRecord:
    """The record in the folder of a converted model."""
    missing = f"{folder} holds no conversion to continue: leave `resume` out to begin one."
    return read_record(ConversionRecord, folder / FILE_NAME, SCHEMA, "a conversion", missing=missing)
