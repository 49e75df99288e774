"""A pretrained model with another attention, as an ordinary model folder."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

import maclaurin
from maclaurin.conversion.calibrate import calibrate_key_offsets
from maclaurin.conversion.choose import Choice
from maclaurin.conversion.measure import (
    Gap,
    Measure,
    Perplexity,
    Tell,
    gap,
    measured_with,
    put_in_place,
    windows_alone,
)
from maclaurin.conversion.memory import Memory
from maclaurin.conversion.text import rows_of
from maclaurin.errors import InputError
from maclaurin.files import new_folder, write_json
from maclaurin.models import MaclaurinForCausalLM, save_quietly
from maclaurin.spec.head_groups import specs_in
from maclaurin.user_files import require_writable_folder

CALIBRATION_ROWS, CALIBRATION_LENGTH = 4, 1024


@final
@dataclass(frozen=True)
class Conversion:
    """What was done, and what it cost on sample text by length."""

    source: str
    choice: Choice
    #: perplexity by length, recall by distance
    gaps: dict[str, dict[int, Gap]]
    memory: Memory
    #: how a memory was chosen, where it was
    chosen: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data, for conversion.json."""
        measured = {
            kind: {str(at): found.to_json() for at, found in by.items()} for kind, by in self.gaps.items()
        }
        return {
            "maclaurin": maclaurin.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "source": self.source,
            "attention": list(self.choice.attention),
            "reasons": list(self.choice.reasons),
            "memory": dataclasses.asdict(self.memory),
            **({} if self.chosen is None else {"chosen": self.chosen}),
            **measured,
        }


def require_new(out: Path) -> None:
    """Raise if the folder exists, as it is not overwritten, or cannot be written."""
    if out.exists():
        raise InputError(f"{out} exists already: choose another --out, or remove it.")
    require_writable_folder(out)


def convert(
    model: MaclaurinForCausalLM,
    source: str,
    choice: Choice,
    *,
    sample: Tensor,
    measures: Sequence[Measure],
    tell: Tell = lambda tokens: None,
) -> Conversion:
    """Swap, and calibrate on sample tokens [T], in place; measure before and after."""
    own = own_attention(model)
    for text in choice.attention:
        if any(spec.gates for spec in specs_in(text)):
            raise InputError(
                f"{text} has gates, and a pretrained model has no weights for them: use a spec without, "
                "such as taylor(2,about=mean)+window(64,sinks=1)/sum."
            )
    if any(spec.orders for text in choice.attention for spec in specs_in(text)):
        calibrate_key_offsets(model, rows_of(sample, CALIBRATION_LENGTH, CALIBRATION_ROWS))
    tell(sample.numel())
    gaps: dict[str, dict[int, Gap]] = {}
    for measure in measures:
        gaps.setdefault(measure.kind, {})[measure.at] = gap(model, own, choice.attention, measure, tell)
    put_in_place(model, choice.attention)
    return Conversion(source, choice, gaps, Memory.of(model, own))


def perplexities(held_out: Tensor, lengths: Sequence[int], tokens: int) -> list[Perplexity]:
    """At each length, on about so many tokens of the text [T], one row at least."""
    long = [str(length) for length in lengths if length > held_out.numel()]
    if long:
        raise InputError(
            f"perplexity cannot be measured at {', '.join(long)} tokens: behind those it is calibrated on, "
            f"the sample text has {held_out.numel():,}. Give a longer text, or lengths up to that."
        )
    return [Perplexity(rows_of(held_out, length, max(1, tokens // length))) for length in lengths]


def measure_recovered(
    out: Path, model: MaclaurinForCausalLM, measures: Sequence[Measure], tell: Tell = lambda tokens: None
) -> dict[str, Any]:
    """Add what the folder's model reaches now, with and without its tail, to its conversion.json."""
    file = out / "conversion.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    alone = windows_alone(written["attention"])
    for measure in measures:
        found = written.setdefault(measure.kind, {}).setdefault(str(measure.at), {})
        recovered = measured_with(model, written["attention"], measure, tell)
        found["recovered"] = recovered
        found["recovered_tail_off"] = None if alone is None else measured_with(model, alone, measure, tell)
        found["gap_closed_recovered"] = _closed_by(recovered, found, measure)
    write_json(file, written)
    return written


def _closed_by(recovered: float, found: dict[str, float | None], measure: Measure) -> float | None:
    """Of the gap between the original and its window alone, as they were before any training."""
    original = found.get("original", found.get("softmax"))  # as it was called before
    if original is None:
        return None
    return Gap(original, found.get("window_only"), recovered, measure.higher_is_better).closed


def own_attention(model: MaclaurinForCausalLM) -> list[str]:
    """The notation of each layer."""
    return [str(layer) for layer in model.config.layer_attention()]


def save(
    model: MaclaurinForCausalLM,
    tokenizer: Any | None,
    conversion: Conversion,
    out: Path,
    measured_on: dict[str, Any] | None = None,
) -> None:
    """Write the model folder atomically."""
    with new_folder(out) as folder:
        save_quietly(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_json(folder / "conversion.json", {**conversion.to_json(), "measured_on": measured_on})
