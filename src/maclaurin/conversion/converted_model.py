"""A pretrained model with another attention: the choice for each layer, key offsets, and the model folder."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from maclaurin.conversion.conversion_record import (
    CALIBRATION_LENGTH,
    CALIBRATION_ROWS,
    ConversionRecord,
    Gap,
    MeasuredGap,
    Memory,
    MemoryChoice,
    SampleSettings,
)
from maclaurin.conversion.measure import Measure, OnTokens, gap, read_with, without_tails
from maclaurin.conversion.memory_budget import memory_of
from maclaurin.conversion.sample_text import rows_of
from maclaurin.errors import InputError
from maclaurin.files import new_folder, require_writable_folder, write_file
from maclaurin.layers.attention import KeyOffset
from maclaurin.models import MaclaurinForCausalLM, save_quietly
from maclaurin.models.modeling import set_attention
from maclaurin.spec.head_groups import specs_in


@final
@dataclass(frozen=True)
class Conversion:
    """The changes of a conversion, and their cost on sample text by length."""

    source: str
    choice: Choice
    #: perplexity by length, recall by distance
    gaps: dict[str, dict[int, Gap]]
    memory: Memory
    #: how a memory was chosen, if it was
    chosen: MemoryChoice | None = None


def require_new(out: Path) -> None:
    """Raise if the folder exists, as it is not overwritten, or cannot be written."""
    if out.exists():
        raise InputError(f"{out} exists already: choose another `out`, or remove it.")
    require_writable_folder(out)


def convert_loaded(
    model: MaclaurinForCausalLM,
    source: str,
    choice: Choice,
    *,
    sample: Tensor,
    measures: Sequence[Measure],
    on_tokens: OnTokens = lambda tokens: None,
) -> Conversion:
    """Swap the attention and calibrate on sample tokens [T], in place; measure before and after."""
    own = own_attention(model)
    for text in choice.attention:
        if any(spec.gates for spec in specs_in(text)):
            raise InputError(
                f"{text} has gates, but a pretrained model has no weights for them: use one without gates, "
                "such as taylor(2,about=mean)+window(64,sinks=1)/sum."
            )
    if any(spec.orders for text in choice.attention for spec in specs_in(text)):
        calibrate_key_offsets(model, rows_of(sample, CALIBRATION_LENGTH, CALIBRATION_ROWS))
    on_tokens(sample.numel())
    gaps: dict[str, dict[int, Gap]] = {}
    for measure in measures:
        gaps.setdefault(measure.kind, {})[measure.at] = gap(model, own, choice.attention, measure, on_tokens)
    set_attention(model, choice.attention)
    return Conversion(source, choice, gaps, memory_of(model, own))


def measure_recovered(
    record: ConversionRecord,
    model: MaclaurinForCausalLM,
    measures: Sequence[Measure],
    on_tokens: OnTokens = lambda tokens: None,
) -> ConversionRecord:
    """The record with measures of the trained model, with and without its tail."""
    alone = without_tails(record.attention)
    for measure in measures:
        recovered = read_with(model, record.attention, measure, on_tokens)
        tail_off = None if alone is None else read_with(model, alone, measure, on_tokens)
        found = record.gaps(measure.kind)[measure.at].after_training(
            recovered, tail_off, higher_is_better=measure.higher_is_better
        )
        record = record.with_gap(measure, found)
    return record


def own_attention(model: MaclaurinForCausalLM) -> list[str]:
    """The notation of each layer."""
    return [str(layer) for layer in model.config.layer_attention()]


def save(
    model: MaclaurinForCausalLM,
    tokenizer: Any | None,
    conversion: Conversion,
    out: Path,
    measured_on: SampleSettings | None = None,
) -> None:
    """Write the model folder atomically, with the page of a chosen memory if pages can be made."""
    with new_folder(out) as folder:
        save_quietly(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        record = _record(conversion, measured_on)
        record.write(folder)
        if conversion.chosen is not None:
            _write_page(folder / "memory.html", record.source, conversion.chosen, record.attention)


def write_plans_page(out: Path, source: str, chosen: MemoryChoice, attention: Sequence[str]) -> None:
    """Write the page of a dry run, next to the folder that a conversion would write."""
    _write_page(out.with_name(f"{out.name}.plans.html"), source, chosen, attention)


def _write_page(file: Path, source: str, chosen: MemoryChoice, attention: Sequence[str]) -> None:
    """Write the page of a chosen memory, if pages can be made."""
    if importlib.util.find_spec("jinja2") is not None:
        from maclaurin.conversion.memory_page import page_of_choice

        write_file(file, page_of_choice(source, chosen, attention).html())


def _record(conversion: Conversion, measured_on: SampleSettings | None) -> ConversionRecord:
    gaps = {
        kind: {at: MeasuredGap.of(found) for at, found in by.items()} for kind, by in conversion.gaps.items()
    }
    return ConversionRecord(
        source=conversion.source,
        attention=conversion.choice.attention,
        reasons=conversion.choice.reasons,
        memory=conversion.memory,
        chosen=conversion.chosen,
        perplexity=gaps.get("perplexity", {}),
        recall=gaps.get("recall", {}),
        measured_on=measured_on,
    )


@final
@dataclass(frozen=True)
class Choice:
    """The attention of every layer, and why."""

    attention: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def changed(self) -> tuple[int, ...]:
        """Layers that do not keep their own attention."""
        return tuple(n for n, why in enumerate(self.reasons) if why != "kept")


def choose(
    own: Sequence[str],
    attention: str,
    *,
    layers: Iterable[int] | None = None,
    sharp: Iterable[int] = (),
    sharp_attention: str | None = None,
) -> Choice:
    """`attention` in `layers` (all by default), but sharp layers keep their own or get `sharp_attention`."""
    for text in (attention, *([] if sharp_attention is None else [sharp_attention])):
        specs_in(text)
    chosen = set(range(len(own)) if layers is None else layers)
    unknown = sorted(chosen - set(range(len(own))))
    if unknown:
        raise InputError(f"the model has layers 0 to {len(own) - 1}, not {', '.join(map(str, unknown))}.")
    hard = set(sharp)
    result, reasons = [], []
    for n, before in enumerate(own):
        if n not in chosen:
            result.append(before)
            reasons.append("kept")
        elif n in hard:
            result.append(sharp_attention or before)
            reasons.append("sharp" if sharp_attention else "kept")
        else:
            result.append(attention)
            reasons.append("swapped")
    if all(reason == "kept" for reason in reasons):
        raise InputError(
            "no layer is left to convert: name other layers, or a `sharp_attention` for sharp ones."
        )
    return Choice(tuple(result), tuple(reasons))


def read_layers(text: str, count: int) -> list[int]:
    """'0-4,7,-1' → layers; negative ones count from the end."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", piece)
        if match is None:
            raise InputError(
                f"`layers` takes comma-separated numbers or ranges (0-4,7 or -1); got {piece.strip()!r}."
            )
        start = int(match[1])
        stop = start if match[2] is None else int(match[2])
        found += [n + count if n < 0 else n for n in range(start, stop + 1)]
    return sorted(set(found))


@torch.no_grad()
def calibrate_key_offsets(model: MaclaurinForCausalLM, rows: Tensor) -> None:
    """Give every layer its mean key over rows [B, T] as an offset; this does not change its output."""
    offsets = [_offset_of(block.self_attn) for block in model.model.layers]
    means = [_Mean() for _ in offsets]
    hooks = [offset.register_forward_hook(mean) for offset, mean in zip(offsets, means, strict=True)]
    try:
        for row in rows:
            model(input_ids=row[None])
    finally:
        for hook in hooks:
            hook.remove()
    for offset, mean in zip(offsets, means, strict=True):
        offset.offset += mean.value.to(offset.offset)
    model.config.key_offset = True


class _Mean:
    """A hook that collects the mean key."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._count = 0

    def __call__(self, module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        self._total = self._total + output.double().sum((0, 1))
        self._count += output.shape[0] * output.shape[1]

    @property
    def value(self) -> Tensor:
        return self._total / self._count


def _offset_of(attention: Any) -> KeyOffset:
    """The layer's offset, created if it has none."""
    if not hasattr(attention, "key_offset"):
        attention.key_offset = KeyOffset(attention.kv_heads, attention.key_size).to(
            attention.k_proj.weight.device
        )
    return attention.key_offset
