"""One attention layer for every spec, or for one spec per group of heads; its modules follow from them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from maclaurin.errors import InputError
from maclaurin.layers.convolution import ShortConvolution
from maclaurin.layers.gates import GateFromToken, StepSize, module_names, needs_step_size
from maclaurin.layers.layer_memory import LayerMemory
from maclaurin.layers.layout import Layout
from maclaurin.layers.rotary import Rotary, rotated
from maclaurin.programs.dispatch import attention
from maclaurin.spec import Argument, AttentionSpec
from maclaurin.spec.head_groups import HeadGroup, LayerAttention


class ResidualLinear(nn.Linear):
    """A matrix that writes to the residual stream; initialisation may scale it down with the depth."""


class AttentionLayer(nn.Module):
    """x → W_o attention(W_q x, W_k x, W_v x; gates of x)."""

    def __init__(
        self,
        attention: LayerAttention,
        *,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        rotary: Rotary,
        bias: bool = False,
        output_bias: bool = False,
        norm_eps: float | None = None,
        key_offset: bool = False,
    ) -> None:
        """Options: projections with a bias, q and k RMS-normed per head, an offset subtracted from keys."""
        super().__init__()
        self._attention, self.extras = attention, attention.extras
        extras = attention.extras
        self.heads, self.kv_heads, self.rotary = heads, kv_heads, rotary
        self.key_size = extras.feature_size or head_size
        self.value_size = head_size
        self.q_proj = nn.Linear(hidden_size, heads * self.key_size, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.key_size, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_size, bias=bias)
        self.o_proj = ResidualLinear(heads * head_size, hidden_size, bias=output_bias)
        if norm_eps is not None:
            self.q_norm = nn.RMSNorm(self.key_size, eps=norm_eps)
            self.k_norm = nn.RMSNorm(self.key_size, eps=norm_eps)
        if key_offset:
            self.key_offset = KeyOffset(kv_heads, self.key_size)
        if extras.convolution:
            channels = (heads + kv_heads) * self.key_size + kv_heads * head_size
            self.convolution = ShortConvolution(channels, extras.convolution, extras.convolution_silu)
        if extras.query_key_affine:
            self.q_affine = nn.LayerNorm(self.key_size)
            self.k_affine = nn.LayerNorm(self.key_size)
        self._add_gates(hidden_size)

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """Key-value heads and their attention."""
        return self._attention.groups

    @groups.setter
    def groups(self, groups: tuple[HeadGroup, ...]) -> None:
        self._attention = LayerAttention(groups, self.extras)

    @property
    def spec(self) -> AttentionSpec:
        """The attention of all heads, if they share one."""
        first, *others = self.groups
        if others:
            raise InputError(
                f"the heads of this layer differ ({LayerAttention(self.groups)}), so it has no single spec: "
                "use `groups`."
            )
        return first.spec

    @spec.setter
    def spec(self, spec: AttentionSpec) -> None:
        self.groups = (HeadGroup(tuple(range(self.kv_heads)), spec),)

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Every tensor that some heads take; it is made for all heads."""
        named = {argument.name: argument for group in self.groups for argument in group.spec.arguments}
        return tuple(named.values())

    def _add_gates(self, hidden_size: int) -> None:
        """A module for every tensor that the spec's parts take."""
        if any(needs_step_size(group.spec, self.extras) for group in self.groups):
            self.step_size = StepSize(hidden_size, self.kv_heads)
        names = module_names(self.arguments)
        for argument in self.arguments:
            heads = self.heads if argument.heads == "query" else self.kv_heads
            gate = GateFromToken(self.extras.recipe(argument), hidden_size, heads, self.value_size)
            self.add_module(names[argument.name], gate)

    def forward(self, hidden_states: Tensor, layout: Layout, memory: LayerMemory | None = None) -> Tensor:
        """[B, T, hidden] → [B, T, hidden]; with a memory, continuing the text it holds."""
        extra = self.extras.extra_tokens
        if extra and memory is not None and not memory.is_empty:
            layout, extra = layout.behind_extra_tokens(extra), 0
        elif extra:
            hidden_states = torch.nn.functional.pad(hidden_states, (0, 0, extra, 0))
            layout = layout.with_extra_tokens(extra)
        q, k, v = self._queries_keys_values(hidden_states, layout, memory)
        gates = self._gates(hidden_states, layout)
        y = self.attend(q, k, v, gates, layout) if memory is None else memory.attend(q, k, v, gates, layout)
        return self.o_proj(y[:, extra:].flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], layout: Layout) -> Tensor:
        """The attention itself. Documents are packed into one row."""
        layer = self._attention
        spec = layer.groups[0].spec if layer.is_uniform else layer
        if layout.cu_seqlens is None:
            mask = layout.key_padding_mask
            return attention(q, k, v, spec, layout="bthd", key_padding_mask=mask, gates=gates)
        cuts, longest = layout.cu_seqlens, layout.max_seqlen
        packed = {name: gate.flatten(0, 1)[None] for name, gate in gates.items()}
        rows = q.shape[:2]
        q, k, v = (u.flatten(0, 1)[None] for u in (q, k, v))
        y = attention(q, k, v, spec, layout="bthd", cu_seqlens=cuts, max_seqlen=longest, gates=packed)
        return y[0].unflatten(0, rows)

    def _queries_keys_values(
        self, hidden: Tensor, layout: Layout, memory: LayerMemory | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        flat = [self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)]
        if self.extras.convolution:
            mixed = self.convolution(torch.cat(flat, dim=-1), layout, memory)
            flat = list(mixed.split([u.shape[-1] for u in flat], dim=-1))
        q = flat[0].unflatten(-1, (self.heads, -1))
        k, v = (u.unflatten(-1, (self.kv_heads, -1)) for u in flat[1:])
        if self.extras.query_key_affine:
            q, k = self.q_affine(q), self.k_affine(k)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.extras.rotary:
            angles = layout.angles.get((self.key_size, q.dtype))
            if angles is None:
                angles = self.rotary.angles(layout.positions, self.key_size, q.dtype)
            q, k = rotated(q, *angles), rotated(k, *angles)
        if hasattr(self, "key_offset"):
            k = self.key_offset(k)
        return q, k, v

    def _gates(self, hidden: Tensor, layout: Layout) -> dict[str, Tensor]:
        step_size = self.step_size(hidden) if hasattr(self, "step_size") else None
        return {
            argument: self.get_submodule(module)(hidden, layout.positions, step_size)
            for argument, module in module_names(self.arguments).items()
        }


class KeyOffset(nn.Module):
    """k − c for keys [B, T, kv heads, d], one c per key-value head, zero until it is calibrated.

    q·(k − c) = q·k − q·c subtracts one number from a whole row of scores. That changes neither softmax nor an
    expansion about the row's mean, but moments of smaller keys lose less when re-centred in low precision.
    """

    offset: Tensor

    def __init__(self, kv_heads: int, key_size: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(kv_heads, key_size))

    def forward(self, k: Tensor) -> Tensor:
        """k − c"""
        return k - self.offset.to(k.dtype)
