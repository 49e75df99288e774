"""`attention` and `plan`: the one entry point to everything that computes attention.

    attention(…) → attend_spec → Plan → Program.run(call) → y, state

`layer_call.py` makes one such call for each group of heads where the heads of a layer differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from maclaurin.errors import InputError
from maclaurin.forms.state import State
from maclaurin.forms.stream import Inputs
from maclaurin.forms.tracing import untraced
from maclaurin.programs.layer_call import attend_layer, plan_layer
from maclaurin.programs.plan import LayerPlan, Plan
from maclaurin.programs.request import STATE_BUDGET, Options
from maclaurin.programs.spec_call import attend_spec, plan_spec
from maclaurin.programs.validate import check_tensors, is_heads_first, tokens_first
from maclaurin.spec import AttentionSpec
from maclaurin.spec.catalogue import resolve
from maclaurin.spec.head_groups import LayerAttention
from maclaurin.spec.part import after_registration


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | None = None,
    return_state: Literal[False] = False,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | str,
    *,
    state: State | None = None,
    return_state: Literal[True],
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> tuple[Tensor, State]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: LayerAttention,
    *,
    state: Sequence[State] | None = None,
    return_state: Literal[True],
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> tuple[Tensor, tuple[State, ...]]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | None = None,
    return_state: bool = False,
    scale: float | None = None,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    form: str = "auto",
    chunk_size: int | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Tensor | tuple[Tensor, State] | tuple[Tensor, tuple[State, ...]]:
    """y_t = p_t N( o_t G_t Σ_{s≤t} (Π_{s<r≤t} f_r) κ(q_t, k_s) i_s v_s ),  y [B, T, H, e].

    Args:
        q: queries [B, T, H, d]. With fewer queries than keys (parallel form, causal) they are the
            last tokens of the text.
        k: keys [B, S, Hkv, d]; H must be a multiple of Hkv.
        v: values [B, S, Hkv, e].
        spec: an AttentionSpec, its notation ("exp/l2"), or a name in the catalogue ("based"). For heads that
            differ, a LayerAttention or its notation ("0,2: exp/sum; *: poly(0)+window(64)/sum").
        state: the state that a previous call with return_state=True returned; the text continues from there.
        return_state: return (y, state) instead of y; for heads that differ, (y, one state per group).
        scale: the factor on q·k; by default the kernel's own, 1/√d for most.
        causal: whether a query sees only keys up to its own.
        cu_seqlens: [n+1] cuts of n sequences packed into one row (B = 1). On a GPU their values are not
            read where a program takes packed sequences in place (`plan` shows it), so the CPU does not
            synchronise with the GPU.
        max_seqlen: the length of the longest, if known; saves reading cu_seqlens.
        key_padding_mask: bool [B, S], True for real tokens; the others have no weight anywhere and
            their outputs are 0.
        form: "auto" (the cheapest), "parallel", "blocked" (parallel, a block of queries at a time),
            "chunked" or "recurrent".
        chunk_size: tokens per chunk; any size gives the same result.
        tolerance: largest error of exp as a truncated series, relative to max|v|.
        score_bound: for exp as a series, a bound on |scale·q·k| for this and all later tokens of
            the text; by default the bound for the tokens so far, which later ones may exceed.
        state_budget: bytes a state may take.
        layout: "bthd", the default, or "bhtd" for tensors in the order of torch's
            scaled_dot_product_attention: q, k, v and y [B, heads, tokens, size], gates [B, heads, tokens].
            Without it, shapes with far more heads than tokens are an error; "bthd" accepts them.
        gates: the tensors that the spec's parts take (`spec.arguments`), by name.
        **named_gates: the same, as keywords:
            input_gate: i, [B, S, Hkv], for *in.
            log_forget: ln f, [B, S, Hkv], for *forget.
            output_gate: o, [B, T, H] or [B, T, H, e], for *out.
            denominator_gate: g, [B, S, H], for /running.
            Your own parts name their own.
    """
    resolved = spec if isinstance(spec, AttentionSpec) else _resolved(spec, k)
    given = gates if type(gates) is dict and not named_gates else _named(gates, named_gates)
    heads_first = layout is not None and is_heads_first(layout)
    if heads_first:
        q, k, v, given = tokens_first(q, k, v, given)
    options = Options(
        return_state, scale, causal, cu_seqlens, max_seqlen, key_padding_mask, form, chunk_size, tolerance,
        score_bound, state_budget, layout is None,
    )  # fmt: skip
    attend: Any = attend_spec if isinstance(resolved, AttentionSpec) else attend_layer
    y, after = attend(resolved, Inputs(q, k, v, given), state, options)
    y = y.transpose(1, 2) if heads_first else y
    return (y, after) if return_state else y


@overload
def plan(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec | str, **options: Any) -> Plan: ...


@overload
def plan(q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention, **options: Any) -> LayerPlan: ...


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec | LayerAttention | str,
    *,
    state: State | Sequence[State] | bool | None = None,
    return_state: bool = False,
    causal: bool = True,
    form: str = "auto",
    chunk_size: int | None = None,
    device: torch.device | str | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    tolerance: float = 1e-6,
    score_bound: float | None = None,
    state_budget: int = STATE_BUDGET,
    layout: str | None = None,
    gates: Mapping[str, Tensor] | None = None,
    **named_gates: Tensor | None,
) -> Plan | LayerPlan:
    """Which program `attention` would run for such a call, and why; it raises the errors of that call.

    Tensors may be on the meta device. state=True plans a call that continues from a state (with one token: a
    decoding step). `device` is where the call would run, by default the device of q, or for meta tensors the
    GPU if there is one. Gates may be left out; those given are checked. For packed sequences it says which
    programs read them in place; only the size of `cu_seqlens` matters.

    Where heads differ, it is a LayerPlan: one plan for each call, and which heads the call is for.

    exp with a state runs as its series. Its order, and so the size of the state, follows from the scores,
    or on the meta device from `score_bound`.
    """
    given = {name: gate for name, gate in _named(gates, named_gates).items() if gate is not None}
    if layout is not None and is_heads_first(layout):
        q, k, v, given = tokens_first(q, k, v, given)
    check_tensors(q, k, v)
    resolved = _resolved(spec, k)
    options = Options(
        return_state or state is True, scale, causal, cu_seqlens, max_seqlen, key_padding_mask, form,
        chunk_size, tolerance, score_bound, state_budget, layout is None,
    )  # fmt: skip
    where = _planned_device(q, device)
    inputs = Inputs(q, k, v, given)
    if isinstance(resolved, LayerAttention):
        return plan_layer(resolved, inputs, state, options, return_state, where)
    return plan_spec(resolved, inputs, state, options, return_state, where)


def _planned_device(q: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if q.device.type != "meta":
        return q.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _named(gates: Mapping[str, Tensor] | None, named: Mapping[str, Tensor | None]) -> Mapping[str, Tensor]:
    """The gates by name, without those that are None."""
    if gates is None:
        gates = {}
    elif not isinstance(gates, Mapping):
        raise InputError(
            f"gates must be a dict of tensors by name, as in {{'input_gate': i}}, not {type(gates).__name__}."
        )
    if not named:
        return gates
    return {**gates, **{name: gate for name, gate in named.items() if gate is not None}}


# ---------------------------------------------------------------------------------- specs by name


class _KnownSpecs:
    """Specs by name, and layers by name and number of heads, as attributes.

    torch.compile traces and guards an attribute of a global object one by one; a dict would be
    guarded as a whole, and each new spec would recompile every graph.
    """


_known_specs = _KnownSpecs()
after_registration(lambda: vars(_known_specs).clear())


def _resolved(spec: AttentionSpec | LayerAttention | str, k: Tensor) -> AttentionSpec | LayerAttention:
    """The spec that the caller means; a layer, if the notation gives heads their own specs."""
    if isinstance(spec, AttentionSpec | LayerAttention):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            f"spec must be an AttentionSpec, a notation such as 'exp/sum' or a catalogue name, not {spec!r}."
        )
    if ":" in spec:
        if not isinstance(k, Tensor) or k.dim() != 4:
            raise InputError(f"k must be a tensor [batch, tokens, heads, size], got {type(k).__name__}.")
        kv_heads = int(k.shape[2])
    else:
        kv_heads = None
    _parse_once(spec, kv_heads)
    return getattr(_known_specs, _as_attribute(spec, kv_heads))


@untraced
def _parse_once(text: str, kv_heads: int | None) -> bool:
    """Parse outside the traced graph: a spec, or with a number of heads a layer."""
    name = _as_attribute(text, kv_heads)
    if not hasattr(_known_specs, name):
        found = resolve(text) if kv_heads is None else LayerAttention.read(text, kv_heads)
        setattr(_known_specs, name, found)
    return True


def _as_attribute(text: str, kv_heads: int | None) -> str:
    """A name without full stops, which tracing does not accept in the name of an attribute."""
    named = text if kv_heads is None else f"{text} for {kv_heads} heads"
    return named.replace(".", "\u2024")
