"""One attention layer for every spec: what it needs follows from the spec and its extras."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from maclaurin.backends.dispatch import attention
from maclaurin.layers.convolution import ShortConvolution
from maclaurin.layers.gates import (
    ForgetGateLayer,
    InputGateLayer,
    OutputGateLayer,
    StepSize,
    needs_step_size,
)
from maclaurin.layers.key_offset import KeyOffset
from maclaurin.layers.layout import Layout
from maclaurin.layers.memory import LayerMemory
from maclaurin.layers.rotary import Rotary, rotated
from maclaurin.spec import AttentionSpec
from maclaurin.spec.extras import LayerExtras


class ResidualLinear(nn.Linear):
    """A matrix that writes to the residual stream; initialisation may narrow it with the depth."""


class AttentionLayer(nn.Module):
    """x → W_o attention(φ-ready W_q x, W_k x, W_v x; gates of x)."""

    def __init__(
        self,
        spec: AttentionSpec,
        extras: LayerExtras,
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
        """Projections with or without bias; q, k RMS-normed per head or not; keys less an offset or not."""
        super().__init__()
        self.spec, self.extras = spec, extras
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

    def _add_gates(self, hidden_size: int) -> None:
        spec, extras = self.spec, self.extras
        if needs_step_size(extras, spec.input_gate, spec.forget_gate):
            self.step_size = StepSize(hidden_size, self.kv_heads)
        if spec.input_gate:
            self.input_gate = InputGateLayer(hidden_size, self.kv_heads, extras.input_gate)
        if spec.forget_gate:
            self.forget_gate = ForgetGateLayer(hidden_size, self.kv_heads, extras.forget_gate)
        if "denominator_gate" in spec.gates:
            self.denominator_gate = nn.Linear(hidden_size, self.heads)
        if "output_gate" in spec.gates:
            self.output_gate = OutputGateLayer(hidden_size, self.heads, self.value_size, extras.output_gate)

    def forward(self, hidden_states: Tensor, layout: Layout, memory: LayerMemory | None = None) -> Tensor:
        """[B, T, hidden] → [B, T, hidden]; with a memory, going on from the text it holds."""
        extra = self.extras.extra_tokens
        if extra and memory is not None and not memory.is_empty:
            layout, extra = layout.behind_extra_tokens(extra), 0
        elif extra:
            hidden_states = torch.nn.functional.pad(hidden_states, (0, 0, extra, 0))
            layout = layout.with_extra_tokens(extra)
        q, k, v = self._queries_keys_values(hidden_states, layout, memory)
        tensors: dict[str, Any] = {"q": q, "k": k, "v": v, **self._gates(hidden_states, layout)}
        y = self.attend(tensors, layout) if memory is None else memory.attend(tensors, layout)
        return self.o_proj(y[:, extra:].flatten(-2))

    def attend(self, tensors: dict[str, Any], layout: Layout) -> Tensor:
        """The attention itself; documents go through as sequences packed into one row."""
        if layout.cu_seqlens is None:
            return cast(
                "Tensor", attention(**tensors, spec=self.spec, key_padding_mask=layout.key_padding_mask)
            )
        packed: dict[str, Any] = {name: t.flatten(0, 1)[None] for name, t in tensors.items()}
        y = attention(**packed, spec=self.spec, cu_seqlens=layout.cu_seqlens, max_seqlen=layout.max_seqlen)
        return cast("Tensor", y)[0].unflatten(0, tensors["q"].shape[:2])

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
        gates: dict[str, Tensor] = {}
        step_size = self.step_size(hidden) if hasattr(self, "step_size") else None
        if self.spec.input_gate:
            gates["input_gate"] = self.input_gate(hidden, layout.positions, step_size)
        if self.spec.forget_gate:
            gates["log_forget"] = self.forget_gate(hidden, step_size)
        if "denominator_gate" in self.spec.gates:
            gates["denominator_gate"] = self.denominator_gate(hidden)
        if "output_gate" in self.spec.gates:
            gates["output_gate"] = self.output_gate(hidden, layout.positions)
        return gates
