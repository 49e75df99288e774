"""Initial weights with which every attention adds as much to the residual stream as softmax would.

    W ← W · rms(softmax's W y) / rms(W y)       W the output projection of a layer, y what it projects

RMS norm is L2 norm times √e, and unnormalised weights grow with the text: two attentions may differ only in
scale at the start, and then a comparison after a few hundred steps shows little else. The factor of each
layer is measured on a few rows of the training text, from the first layer to the last, relative to softmax
with the same settings and seed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM

#: number of rows, and tokens per row, for measuring the scale
ROWS, TOKENS = 4, 512
SOFTMAX = "exp/sum"


@torch.no_grad()
def start_as_softmax(model: MaclaurinForCausalLM, tokens: Tensor, seed: int) -> None:
    """Scale the output projections of a model with random weights, given rows of its text [B, T]."""
    tokens = tokens[:ROWS, :TOKENS]
    config = MaclaurinConfig.from_dict({**model.config.to_dict(), "attention": SOFTMAX})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        beside = MaclaurinForCausalLM(config)
    sizes = _sizes_of_outputs(beside, tokens)
    hooks = [
        projection.register_forward_hook(_rescale(size))
        for projection, size in zip(_projections(model), sizes, strict=True)
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()


def _projections(model: MaclaurinForCausalLM) -> list[nn.Linear]:
    return [layer.self_attn.o_proj for layer in model.model.layers]  # type: ignore[union-attr, misc]


def _sizes_of_outputs(model: MaclaurinForCausalLM, tokens: Tensor) -> list[float]:
    """The rms of what each layer's attention adds to the residual stream."""
    found: list[float] = []

    def note(module: nn.Module, given: object, output: Tensor) -> None:
        found.append(float(_rms(output)))

    hooks = [projection.register_forward_hook(note) for projection in _projections(model)]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def _rescale(size: float):
    def hook(module: nn.Linear, given: object, output: Tensor) -> Tensor:
        factor = size / float(_rms(output).clamp(min=1e-12))
        for parameter in module.parameters():
            parameter.mul_(factor)
        return output * factor

    return hook


def _rms(u: Tensor) -> Tensor:
    return u.float().square().mean().sqrt()
