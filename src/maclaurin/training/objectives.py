"""What a run makes smaller: the loss of the next token, or the distance to another model's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from maclaurin.data.batch import NOT_SCORED, Batch
from maclaurin.errors import InputError
from maclaurin.layers.layout import Layout
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.models.loading import load_model
from maclaurin.training.config import TrainConfig
from maclaurin.training.processes import Processes


class Objective(Protocol):
    """Something to make smaller."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Losses [B, T] of scored places (0 elsewhere), and where the answer was right, if there is one."""
        ...


def objective_of(config: TrainConfig, model: MaclaurinForCausalLM, processes: Processes) -> Objective:
    """The objective a config names."""
    if config.objective == "next-token":
        return next_token
    if config.teacher is None:
        raise InputError(f"objective={config.objective} needs a teacher: the model whose attention to match.")
    if processes.world > 1:
        raise InputError(
            f"objective={config.objective} runs in one process: it looks into layers one by one, which "
            "processes that share a model cannot."
        )
    teacher, _ = load_model(config.teacher)
    return MatchAttention(teacher.to(processes.device), model)  # type: ignore[arg-type]


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of the next token."""
    logits = model(input_ids=batch.tokens, documents=batch.documents).logits
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOT_SCORED, reduction="none"
    )
    return losses.unflatten(0, batch.targets.shape), logits.argmax(-1) == batch.targets


class MatchAttention:
    """Mean over layers of ‖student's attention(x) − teacher's‖² / mean ‖teacher's‖², on the teacher's x.

    Layers whose attention is the teacher's are left out; only the attention of the others is trained.
    """

    def __init__(self, teacher: MaclaurinForCausalLM, student: MaclaurinForCausalLM) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        pairs = list(zip(_attentions(teacher), _attentions(student), strict=True))
        self.layers = [n for n, (old, new) in enumerate(pairs) if old.spec != new.spec]
        if not self.layers:
            raise InputError("the model has the teacher's own attention in every layer: nothing to match.")
        _train_only([_attentions(student)[n] for n in self.layers], student)

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Distances, and no answers."""
        layout = _layout(batch)
        with torch.no_grad(), _recorded(self.teacher, self.layers) as seen:
            self.teacher.model(input_ids=batch.tokens, documents=batch.documents)
        students = _attentions(_unwrapped(model))
        errors = []
        for n in self.layers:
            x, wanted = seen[n]
            found = students[n](x, layout)
            size = wanted.float().square().sum(-1).mean()
            errors.append((found.float() - wanted.float()).square().sum(-1) / size)
        losses = torch.stack(errors).mean(0)
        return torch.where(batch.targets != NOT_SCORED, losses, 0.0), None


def _train_only(parts: list[nn.Module], model: nn.Module) -> None:
    """Freeze what no loss reaches, so that the optimizer has no parameters without gradients."""
    reached = {id(parameter) for part in parts for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in reached:
            parameter.requires_grad_(False)


def _attentions(model: MaclaurinForCausalLM) -> list[Any]:
    return [block.self_attn for block in model.model.layers]


def _unwrapped(model: nn.Module) -> Any:
    return getattr(model, "_orig_mod", model)  # torch.compile's wrapper


def _layout(batch: Batch) -> Layout:
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
    return Layout.of(positions, None, batch.documents)


@contextmanager
def _recorded(model: MaclaurinForCausalLM, layers: list[int]) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
    """(input, output) of the attention of these layers, as the model runs."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def record(n: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            seen[n] = (arguments[0], output[0] if isinstance(output, tuple) else output)

        return hook

    attentions = _attentions(model)
    hooks = [attentions[n].register_forward_hook(record(n)) for n in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
