"""One optimizer step: learning rate, gradients, clipping, AdamW, and the check for non-finite numbers."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maclaurin.errors import MaclaurinError
from maclaurin.training.batches import StepBatch
from maclaurin.training.config import TrainConfig
from maclaurin.training.losses import Objective
from maclaurin.training.processes import Processes


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 0, 1, …: lr·(step+1)/warmup during warm-up, then from lr down to final_lr·lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    end = config.decay_steps or config.steps
    done = min(1.0, (step - config.warmup) / max(1, end - config.warmup))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.final_lr + (1 - config.final_lr) * left)


#: part of the name of the output projections' parameters
OUTPUT = ".o_proj."


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings, not on norms, biases, convolutions and rates."""
    groups = [
        {"params": [parameter for _, parameter in found], "weight_decay": decay}
        for found, decay, _ in _groups(model, config)
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


_Group = tuple[list[tuple[str, nn.Parameter]], float, float]


def _groups(model: nn.Module, config: TrainConfig) -> list[_Group]:
    """(parameters, weight decay, factor of the learning rate), without empty groups.

    Output projections are separate groups only if they have another rate, so that checkpoints of other
    runs keep their form.
    """
    parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    apart = config.output_lr != 1.0

    def chosen(decays: bool, output: bool) -> list[tuple[str, nn.Parameter]]:
        return [
            (n, p) for n, p in parameters if _decays(n, p) == decays and (apart and OUTPUT in n) == output
        ]

    found: list[_Group] = [
        (chosen(decays, output), config.weight_decay if decays else 0.0, config.output_lr if output else 1.0)
        for output in (False, True)
        for decays in (True, False)
    ]
    return [group for group in found if group[0]]


def _decays(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2 and "convolution" not in name


class StepResult(NamedTuple):
    """Loss and gradient norm on the device; reading them waits for it."""

    loss: Tensor
    gradient_norm: Tensor


class OptimizerStep:
    """Gradients of a batch, applied unless the loss or a gradient is not finite.

    The loss of a step is Σ losses / Σ scored tokens over the whole batch, for any number of processes and
    accumulated parts. After the first step that is not finite (or whose loss is above config.largest_loss) no
    update is applied. This is decided on the device, so no step waits for it: the weights stay as they were
    before that step until the trainer reads the numbers and stops.
    """

    def __init__(self, objective: Objective, config: TrainConfig, processes: Processes) -> None:
        self.config, self.processes = config, processes
        self.objective = objective
        self.shared = _distributed(objective, config, processes)
        self.module: nn.Module = self.shared
        self.optimizer = make_optimizer(objective, config)
        self._factors = [factor for _, _, factor in _groups(objective, config)]
        self._diverged = torch.zeros((), device=processes.device)

    def compile(self) -> None:
        """Run the forward and backward pass through torch.compile from now on."""
        self.module = torch.compile(self.shared)  # type: ignore[assignment]

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return self.module is not self.shared

    def run_eagerly(self) -> None:
        """Undo `compile`, and drop the gradients of a step that failed half-way."""
        self.module = self.shared
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self, batch: StepBatch, rate: float) -> StepResult:
        """One step at this learning rate."""
        loss = self.gradients(batch)
        norm = _whole(nn.utils.clip_grad_norm_(self.objective.parameters(), self.config.clip or math.inf))
        sound = norm.isfinite() & (loss <= self.config.largest_loss)
        self._diverged = torch.where(sound, self._diverged, 1.0)
        for group, factor in zip(self.optimizer.param_groups, self._factors, strict=True):
            group["lr"] = rate * factor
        self.optimizer.found_inf = self._diverged  # type: ignore[attr-defined]  # what AMP's GradScaler sets
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, norm)

    def gradients(self, batch: StepBatch) -> Tensor:
        """Compute the gradients of the parameters; returns the loss over all processes."""
        here = batch.to(self.processes.device)
        scored: float | Tensor = float(max(1, batch.scored))
        if self.processes.world > 1:
            scored = self.processes.total(torch.tensor(scored, device=self.processes.device))
        total = torch.zeros((), device=self.processes.device)
        for number, part in enumerate(here.parts, start=1):
            if self.is_compiled and part.answers_at is not None:
                any_number(part.answers_at)
            with self.autocast(), self._exchange(number == len(here.parts)):
                loss = self.module(*part.tensors) / scored
                (loss * self.processes.world).backward()  # gradients are averaged over processes
            total += loss.detach()
        return self.processes.total(total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of the config."""
        if self.config.precision == "bf16":
            return torch.autocast(self.processes.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _exchange(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Exchange gradients between processes only with the last part of a batch."""
        if isinstance(self.shared, DistributedDataParallel):
            return contextlib.nullcontext() if last else self.shared.no_sync()
        if hasattr(self.shared, "set_requires_gradient_sync"):
            self.shared.set_requires_gradient_sync(last)  # FSDP2  # type: ignore[operator]
        return contextlib.nullcontext()


def any_number(places: Tensor) -> None:
    """Let torch.compile expect any length of a list, instead of compiling again for the second length."""
    from torch._dynamo import maybe_mark_dynamic

    maybe_mark_dynamic(places, 0)


def _distributed(objective: Objective, config: TrainConfig, processes: Processes) -> nn.Module:
    """The objective wrapped in DDP or FSDP."""
    if processes.world == 1:
        return objective
    if config.parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        stack: Any = objective.model.base_model
        for block in stack.layers:
            fully_shard(block)
        fully_shard(objective)
        register_fsdp_forward_method(objective, "by_token")
        return objective
    devices = [processes.device] if processes.device.type == "cuda" else None
    return DistributedDataParallel(objective, device_ids=devices)


# ----------------------------------------------------------------------------------------- divergence


class Diverged(MaclaurinError):
    """The loss or a gradient is not finite, or the loss is above largest_loss."""

    def __init__(self, step: int, reason: str, gradients: str, checkpoint: Path | None) -> None:
        self.step = step
        last = (
            f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
        )
        super().__init__(
            f"step {step}: {reason}. The update of this step was not applied; {last}.\n{gradients}\n"
            "Try a lower learning rate, clipping, or a norm in the attention."
        )


def problem_with(loss: float, norm: float, largest_loss: float) -> str | None:
    """Why a step has diverged, or None."""
    if not math.isfinite(loss):
        return "the loss is not a finite number"
    if loss > largest_loss:
        return f"the loss is {loss:.4g}, above largest_loss={largest_loss:g}"
    if not math.isfinite(norm):
        return f"the gradient is not finite, at a loss of {loss:.4g}"
    return None


#: parameters in the message about a run that diverged
SHOWN_GRADIENTS = 12


def largest_gradients(model: nn.Module) -> str:
    """Norms of weights and gradients by parameter: first those that are not finite, then the largest."""
    rows = []
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            rows.append((name, _norm(parameter), _norm(parameter.grad)))
    rows.sort(key=lambda row: -row[2] if math.isfinite(row[2]) else -math.inf)
    shown = rows[:SHOWN_GRADIENTS]
    lines = [f"  {name}: |weight| {weight:.3g}, |gradient| {norm:.3g}" for name, weight, norm in shown]
    return "\n".join(["largest gradients:", *lines])


def _norm(tensor: Tensor) -> float:
    return float(_whole(tensor.detach().float().norm()))


def _whole(tensor: Tensor) -> Tensor:
    """The full tensor, if FSDP has split it over processes."""
    full = getattr(tensor, "full_tensor", None)
    return (full() if full else tensor).detach()
