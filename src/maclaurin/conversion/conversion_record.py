"""conversion.json: the changes of a conversion, the choice of its memory, and its cost on sample text.

Records are read without torch.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import maclaurin
from maclaurin.evaluation.results import Score
from maclaurin.plain_data import read_record, write_json

if TYPE_CHECKING:
    from maclaurin.conversion.measure import Measure, Reading

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


#: name of a number of a gap → the scores of its questions, as `maclaurin eval` has them: acc, log_odds_gain
Scores = dict[str, dict[str, Score]]


@final
@dataclass(frozen=True)
class Gap:
    """One measure on the same text, and how much of the gap between window and original the tail closes."""

    original: float
    window_only: float | None
    converted: float
    higher_is_better: bool = False
    scores: Scores = field(default_factory=dict)

    @classmethod
    def of(
        cls, original: Reading, window_only: Reading | None, converted: Reading, *, higher_is_better: bool
    ) -> Gap:
        """From readings of the three attentions."""
        alone = None if window_only is None else window_only.value
        scores = scores_of({"original": original, "window_only": window_only, "converted": converted})
        return cls(original.value, alone, converted.value, higher_is_better, scores)

    @property
    def closed(self) -> float | None:
        """1: as good as the original; 0: the tail adds nothing; None: no window, or no gap."""
        if self.window_only is None:
            return None
        width, gained = self.window_only - self.original, self.window_only - self.converted
        if self.higher_is_better:
            width, gained = self.original - self.window_only, self.converted - self.window_only
        return gained / width if width > 0 else None


@final
@dataclass(frozen=True)
class MeasuredGap:
    """A `Gap` with the share of it that is closed, and the same after training.

    recovered_tail_off     the trained model with its tail and kept keys switched off
    gap_closed_recovered   the closed share of the gap between the original and its window, both untrained
    scores                 of recall: 95 % intervals of the shares, and log-odds less those without the facts
    """

    original: float
    window_only: float | None
    converted: float
    gap_closed: float | None
    recovered: float | None = None
    recovered_tail_off: float | None = None
    gap_closed_recovered: float | None = None
    scores: Scores = field(default_factory=dict)

    @classmethod
    def of(cls, gap: Gap) -> MeasuredGap:
        """The gap before any training."""
        return cls(gap.original, gap.window_only, gap.converted, gap.closed, scores=gap.scores)

    def after_training(
        self, recovered: Reading, tail_off: Reading | None, *, higher_is_better: bool
    ) -> MeasuredGap:
        """The same with the measures of the trained model."""
        closed = Gap(self.original, self.window_only, recovered.value, higher_is_better).closed
        return dataclasses.replace(
            self,
            recovered=recovered.value,
            recovered_tail_off=None if tail_off is None else tail_off.value,
            gap_closed_recovered=closed,
            scores=self.scores | scores_of({"recovered": recovered, "recovered_tail_off": tail_off}),
        )


def scores_of(readings: Mapping[str, Reading | None]) -> Scores:
    """The scores of those readings that have some."""
    return {name: found.scores for name, found in readings.items() if found is not None and found.scores}


@final
@dataclass(frozen=True)
class Memory:
    """Bytes of the cache for one text, counted in bf16 like a budget; a model in fp32 takes twice that.

    state_bytes            of all layers with a state of fixed size
    bytes_per_token        that the other layers add with every token
    original_state_bytes   the same as state_bytes, for the original
    original               the same as bytes_per_token, for the original
    """

    state_bytes: int
    bytes_per_token: int
    original_state_bytes: int
    original: int

    @property
    def break_even_tokens(self) -> int | None:
        """The length of text from which the converted model takes less; None if it never does."""
        saved = self.original - self.bytes_per_token
        return None if saved <= 0 else max(0, -(-(self.state_bytes - self.original_state_bytes) // saved))


@final
@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that a text of `at` tokens may take; if constant, longer texts may not take more."""

    bytes: int
    at: int
    constant: bool
    #: bytes of the original's keys and values at that length
    original: int

    def times(self, factor: float) -> MemoryBudget:
        """A budget for the same text with `factor` times the bytes."""
        return dataclasses.replace(self, bytes=int(factor * self.bytes))

    def __str__(self) -> str:
        share = f"{self.bytes / self.original:.1%} of the original's {self.original:,}"
        kind = "at any length" if self.constant else f"at {self.at:,} tokens"
        return f"{self.bytes:,} bytes {kind} ({share} at {self.at:,})"


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
    questions: int | None = None


@final
@dataclass(frozen=True)
class MemoryChoice:
    """How a memory was chosen.

    heads           numbers [layers][heads] by the name of the measure
    other_budgets   the best plans for fewer and for more bytes, if measured
    references      simple plans of the same bytes, to compare with
    recall_weight   nats per token that a drop of 1 in the log-odds of right answers costs
    """

    budget: MemoryBudget
    plan: ChosenPlan
    original: MeasuredOriginal
    measured: tuple[MeasuredPlan, ...]
    heads: dict[str, list[list[float]]]
    other_budgets: tuple[MeasuredPlan, ...] = ()
    references: tuple[MeasuredPlan, ...] = ()
    recall_weight: float = 0.1


@final
@dataclass(frozen=True)
class Recovery:
    """Settings of the training: steps of each stage, data, learning rates."""

    match_steps: int = 0
    text_steps: int = 0
    data: str = "stdlib"
    lora: int = 0
    length: int = 1024
    batch_size: int = 8
    match_lr: float = 1e-3
    text_lr: float = 1e-4
    precision: str = "fp32"
    device: str = "auto"
    seed: int = 0
    kl_steps: int = 0
    #: share of rows with facts and questions, or with copies (data/recall_rows.py); largest distance of facts
    mix: float = 0.0
    reach: int | None = None
    #: weight of the mean loss of answers; the mean divergence from the original's predictions has weight 1
    answer_weight: float = 0.1
    #: parts of a batch that are computed one after the other, to save memory
    accumulate: int = 1

    @property
    def has_steps(self) -> bool:
        """Whether there is anything to train."""
        return bool(self.match_steps or self.kl_steps or self.text_steps)


@final
@dataclass(frozen=True)
class RecoveryRecord:
    """The training after a conversion, and the seconds of all its parts.

    finished   whether it was trained to the end and measured
    """

    settings: Recovery
    seconds: float
    finished: bool = False


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

    def with_finished_training(self) -> ConversionRecord:
        """The same once the trained model is measured."""
        assert self.recovery is not None
        return dataclasses.replace(self, recovery=dataclasses.replace(self.recovery, finished=True))

    def has_finished(self, settings: Recovery) -> bool:
        """Whether nothing is left of a training with these settings, on whichever device."""
        known = self.recovery
        if known is None or not known.finished:
            return False
        return dataclasses.replace(known.settings, device=settings.device) == settings

    def write(self, folder: Path) -> None:
        """Replace conversion.json in this folder."""
        write_json(folder / FILE_NAME, self, SCHEMA)


def read_conversion(folder: Path) -> ConversionRecord:
    """The record in the folder of a converted model."""
    missing = f"{folder} holds no conversion to continue: leave `resume` out to begin one."
    return read_record(ConversionRecord, folder / FILE_NAME, SCHEMA, "a conversion", missing=missing)
