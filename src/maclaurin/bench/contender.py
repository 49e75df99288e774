"""A program in the race: something that computes an output from a case's tensors, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from maclaurin.errors import MaclaurinError
from maclaurin.spec import AttentionSpec


class PeerMissing(MaclaurinError):
    """A peer that cannot be had here; the message says why."""


@final
@dataclass(frozen=True)
class Contender:
    """`call` gives y [B, T, H, e]; `leaves` are the tensors it is differentiated by.

    `means` is the spec its output must equal, None for a program that computes something of its own.
    """

    name: str
    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    means: AttentionSpec | None

    def forward(self) -> Tensor:
        """As in training: what the backward pass needs is kept."""
        return self.call()

    def forward_backward(self, direction: Tensor) -> list[Tensor]:
        """The output and the gradients of all leaves it depends on."""
        y = self.call()
        gradients = torch.autograd.grad(y, self.leaves, direction, allow_unused=True)
        return [y.detach(), *(g for g in gradients if g is not None)]
