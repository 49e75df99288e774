"""Low-rank adapters: W x + (α/r) B A x, with W frozen, A and B trained, B zero at first (Hu et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: the matrices that get one
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: α/r: what an adapter's product is multiplied by
ADAPTER_SCALE = 2.0


class AdaptedLinear(nn.Module):
    """A frozen matrix and its adapter, under the matrix's own name."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank, **like))
        nn.init.normal_(self.lora_a, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """W x + (α/r) B A x"""
        change = nn.functional.linear(nn.functional.linear(x, self.lora_a), self.lora_b)
        return self.linear(x) + ADAPTER_SCALE * change

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One matrix that does the same."""
        self.linear.weight += ADAPTER_SCALE * (self.lora_b @ self.lora_a).to(self.linear.weight.dtype)
        return self.linear.requires_grad_(True)


def with_adapters(model: nn.Module, rank: int) -> None:
    """Freeze the model and give its projections adapters; gates and norms of attention stay trainable."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ADAPTED and isinstance(child, nn.Linear):
                setattr(parent, name, AdaptedLinear(child, rank))
            elif "gate" in name and name not in ADAPTED:
                child.requires_grad_(True)


def merge_adapters(model: nn.Module) -> None:
    """Every adapted matrix as an ordinary one again."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, AdaptedLinear):
                setattr(parent, name, child.merged())
