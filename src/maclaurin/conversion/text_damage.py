"""The cost on text of a smaller memory for each head, estimated from one backward pass.

    damage of head h with memory m  =  ½ E (g · (y_m − y))²  per token,      in nats

y is the output of the head's attention, y_m its output with the memory m, and g = ∂(−ln p)/∂y for next tokens
drawn from the model's own predictions. That is the second-order increase of the divergence from the original
(Fisher information), for each token and head alone. The sum over heads estimates the cost of a plan; it is
used to share bytes among heads, and the plans are then measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.conversion.measure import MeasureFile
from maclaurin.layers.watch_attention import AttentionCall, watch_attention
from maclaurin.models import MaclaurinForCausalLM
from maclaurin.programs.dispatch import attention
from maclaurin.training.losses import summed_cross_entropy

#: predictions whose logits are in memory at a time
_ROWS = 512


@final
@dataclass(frozen=True)
class TextDamage:
    """Damage by memory, in nats per token: [layers][key-value heads]."""

    of: dict[str, list[list[float]]]

    def __call__(self, memory: str, layer: int, head: int) -> float:
        """The estimate for one head."""
        return self.of[memory][layer][head]


def measure_damage(
    model: MaclaurinForCausalLM,
    rows: Tensor,
    memories: Sequence[str],
    file: MeasureFile,
    report: Callable[[float], None] = lambda share: None,
) -> TextDamage:
    """Measure the damage of every head with each memory on texts [B, T], unless it is in the file."""
    names = {memory: f"damage on {list(rows.shape)}: {memory}" for memory in memories}
    unknown = [memory for memory, name in names.items() if name not in file.found]
    sums: dict[str, Tensor] = {}
    for done, row in enumerate(rows if unknown else []):
        for memory, found in _of_text(model, row.to(model.device), unknown):
            sums[memory] = sums.get(memory, torch.zeros(())) + found / len(rows)
            report((done + len(sums) / len(unknown)) / len(rows))
    for memory in unknown:
        file.keep(names[memory], [[float(f"{x:.4g}") for x in heads] for heads in sums[memory].tolist()])
    return TextDamage({memory: file.found[name] for memory, name in names.items()})


def _of_text(
    model: MaclaurinForCausalLM, tokens: Tensor, memories: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """(memory, damage [layers, heads]) on one text [T]."""
    calls = _calls(model, tokens)
    for memory in memories:
        with torch.no_grad():
            yield memory, torch.stack([call.damage(memory) for call in calls])


@dataclass
class _Call:
    """Inputs and output of a layer's attention, and the gradient of the loss there: [1, T, heads, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    slope: Tensor | None = None

    def damage(self, memory: str) -> Tensor:
        """½ Σ_t (g·Δ)² / T of every key-value head."""
        assert self.slope is not None
        change = attention(self.q, self.k, self.v, memory, layout="bthd").float() - self.y.detach().float()
        along = (self.slope.float() * change).sum(-1)  # [1, T, H]
        by_head = along.unflatten(-1, (self.k.shape[2], -1)).sum(-1)
        return by_head.square().mean((0, 1)).div(2).cpu()


def _calls(model: MaclaurinForCausalLM, tokens: Tensor) -> list[_Call]:
    """Every layer's attention over a text, with the gradient of the summed loss of drawn next tokens."""
    generator = torch.Generator(device=tokens.device).manual_seed(0)
    calls: list[_Call] = []

    def watch(call: AttentionCall) -> None:
        calls.append(_Call(call.q.detach(), call.k.detach(), call.v.detach(), call.y))

    with watch_attention(model, watch), torch.enable_grad():
        hidden = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        weight = model.lm_head.weight.detach()
        with torch.no_grad():
            drawn = [
                torch.multinomial((part @ weight.t()).float().softmax(-1), 1, generator=generator)[:, 0]
                for part in hidden.split(_ROWS)
            ]
        loss = summed_cross_entropy(hidden, weight, torch.cat(drawn))
    slopes = torch.autograd.grad(loss, [call.y for call in calls])
    for call, slope in zip(calls, slopes, strict=True):
        call.slope = slope
    return calls
