"""The cost of a conversion, measured with the tail and, as a control, with the tail switched off.

Results are kept in a file next to the output folder (`MeasureFile`), from which a stopped conversion
continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, final

from torch import Tensor

from maclaurin.conversion.conversion_record import Gap
from maclaurin.conversion.sample_text import rows_of
from maclaurin.errors import InputError
from maclaurin.evaluation.likelihood import perplexity, summed_loss, tokens_at_once
from maclaurin.evaluation.results import Score
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.models.modeling import with_attention
from maclaurin.plain_data import write_json
from maclaurin.spec.catalogue import resolve
from maclaurin.spec.head_groups import specs_in, with_each_spec

#: called with the number of tokens that were read
OnTokens = Callable[[int], None]


@final
@dataclass(frozen=True)
class Reading:
    """The number that a measure found, and if questions were asked, the scores of their answers."""

    value: float
    scores: dict[str, Score] = field(default_factory=dict)


class Measure(Protocol):
    """One number of a model: what it is, at which length or distance, and how many tokens it reads."""

    kind: ClassVar[str]
    higher_is_better: ClassVar[bool]

    @property
    def at(self) -> int:
        """The length or distance."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens it reads."""
        ...

    def read(self, model: MaclaurinForCausalLM, on_tokens: OnTokens) -> Reading:
        """The number for the model with its present attention and weights."""
        ...


@final
@dataclass(frozen=True)
class Perplexity:
    """Perplexity of the next token over rows [B, T]."""

    rows: Tensor
    kind: ClassVar[str] = "perplexity"
    higher_is_better: ClassVar[bool] = False

    @property
    def at(self) -> int:
        """Tokens in a row."""
        return self.rows.shape[1]

    @property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return self.rows.numel()

    def read(self, model: MaclaurinForCausalLM, on_tokens: OnTokens) -> Reading:
        """The perplexity; it reads as many rows at once as keep the device busy."""
        total = 0.0
        for some in self.rows.split(max(1, tokens_at_once(model.device) // self.at)):
            total += summed_loss(model, some.to(model.device))
            on_tokens(some.numel())
        return Reading(perplexity(total / (self.rows.numel() - len(self.rows))))


def perplexities(held_out: Tensor, lengths: Sequence[int], tokens: int) -> list[Perplexity]:
    """A measure for each length, on about `tokens` tokens of the text [T], at least one row."""
    long = [str(length) for length in lengths if length > held_out.numel()]
    if long:
        raise InputError(
            f"perplexity cannot be measured at {', '.join(long)} tokens: after those used for "
            f"calibration, the sample text has {held_out.numel():,}. Give a longer text or shorter lengths."
        )
    return [Perplexity(rows_of(held_out, length, max(1, tokens // length))) for length in lengths]


def gap(
    model: MaclaurinForCausalLM,
    own: Sequence[str],
    converted: Sequence[str],
    measure: Measure,
    on_tokens: OnTokens = lambda tokens: None,
) -> Gap:
    """The measure for original, window alone and converted, with the same weights."""
    alone = without_tails(converted)
    return Gap.of(
        read_with(model, own, measure, on_tokens),
        None if alone is None else read_with(model, alone, measure, on_tokens),
        read_with(model, converted, measure, on_tokens),
        higher_is_better=measure.higher_is_better,
    )


def read_with(
    model: MaclaurinForCausalLM,
    attention: Sequence[str],
    measure: Measure,
    on_tokens: OnTokens = lambda tokens: None,
) -> Reading:
    """The measure with this attention."""
    with with_attention(model, attention):
        return measure.read(model, on_tokens)


def measured_with(model: MaclaurinForCausalLM, attention: Sequence[str], measure: Measure) -> float:
    """The number of the measure with this attention."""
    return read_with(model, attention, measure).value


def without_tails(attention: Sequence[str]) -> list[str] | None:
    """The same with every tail and every kept key switched off; None if there is neither."""
    beyond = (s for text in attention for s in specs_in(text) if s.window and (s.orders or s.window.kept))
    return [with_each_spec(text, _alone) for text in attention] if any(beyond) else None


def beyond_windows(attention: Sequence[str]) -> str:
    """The name of what heads keep beside their windows: tail, kept keys, or both."""
    specs = [spec for text in attention for spec in specs_in(text) if spec.window]
    has_tail = any(spec.orders for spec in specs)
    has_kept = any(spec.window.kept for spec in specs if spec.window)
    named = [name for name, there in (("tail", has_tail), ("kept keys", has_kept)) if there]
    return " and ".join(named) or "tail"


def _alone(text: str) -> str:
    window: Any = resolve(text).window
    if window is None:
        return text
    return f"poly(0)+{replace(window, kept=0) if window.kept else window}/sum"


@final
@dataclass
class MeasureFile:
    """Results by name; each is written at once. Without a path they stay in memory."""

    path: Path | None
    #: model, questions and text: results with another identity are not used
    identity: dict[str, Any]
    found: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def path_for(out: Path) -> Path:
        """The path of the file for an output folder."""
        return out.with_name(f".{out.name}.measured.json")

    @staticmethod
    def open(path: Path | None, identity: dict[str, Any], *, resume: bool) -> MeasureFile:
        """Read the file; without `resume`, start an empty one unless it has measures of the same things."""
        if path is None or not (resume or _has_identity(path, identity)):
            return MeasureFile(path, identity)
        if not path.is_file():
            raise InputError(f"there is no {path} to resume from: leave `resume` out to start.")
        try:
            data = json.loads(path.read_text("utf-8"))
        except ValueError as problem:
            raise InputError(f"{path} is not JSON ({problem}): remove it, or leave `resume` out.") from None
        for name, mine in identity.items():
            theirs = data.get("identity", {}).get(name)
            if theirs != mine:
                raise InputError(
                    f"{path} was measured with {name} {theirs}, but now it is {mine}: use the same again, "
                    "or leave `resume` out to start again."
                )
        return MeasureFile(path, identity, data["found"])

    def keep(self, name: str, value: Any) -> None:
        """Add a result, and write the file."""
        self.found[name] = value
        if self.path is not None:
            write_json(self.path, {"identity": self.identity, "found": self.found}, indent=None)

    def remove(self) -> None:
        """Delete the file, once the folder is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _has_identity(path: Path, identity: dict[str, Any]) -> bool:
    """Whether the file has measures of the same model, text and questions."""
    try:
        return json.loads(path.read_text("utf-8"))["identity"] == identity
    except (OSError, ValueError, KeyError, TypeError):
        return False
