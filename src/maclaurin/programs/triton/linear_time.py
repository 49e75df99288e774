"""Attention whose weights are a polynomial of low order, in time linear in the text.

    w_ts = e^{L_t − L_s} Σ_n α_n(t) (q·k)ⁿ,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, t, or 1

The text is cut into chunks. Queries read the keys of their own chunk pair by pair, and all earlier keys through
moments (moments.py). L is the running total of the log forget gate within a chunk; α are constants, or one number
per order and row.

Backward, with dn = dy/D, dz = dD − Σ dy∘y/D and g_ts = e^{L_t − L_s}(dn_t·v_s + dz_t):

    r⁽ⁿ⁾_t = Σ_s g_ts (q·k)ⁿ⁻¹ k_s,     dq = Σ_n n α_n r⁽ⁿ⁾,     dα_n = q·r⁽ⁿ⁾,   dα₀ = Σ_s g_ts

and keys and values read the moments of (q, dn, dz) over all later chunks in the same way. Moments are stored in blocks
that belong to one entry (block_layout.py), so both directions are sums over entries:

    φ(q)·S = Σ_a q_a Q S_a,             Σ_s g (q·k)ⁿ⁻¹ k from Σ_a q_a dn S_aᵀ,        Q = q, or products of two
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.block_layout import block_rows, times_counted, together
from maclaurin.programs.triton.launch import MOST_SHAPES, Launch, Layout, prepared
from maclaurin.programs.triton.linear_time_kernels import backward_keys, backward_queries, forward_rows
from maclaurin.programs.triton.moments import Moments, Side, across, moments
from maclaurin.programs.triton.pair_moments import lower_sums
from maclaurin.programs.triton.rows import quotient_backward
from maclaurin.programs.triton.tiles import Tile, cdiv, empty_rows, operand_options, tile_options, width

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "forward": (Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
    "queries": (Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
    "keys": (Tile(64, 64, 4, 3), Tile(32, 128, 8, 3)),
}


class Call(NamedTuple):
    """The non-tensor arguments of a call.

    coefficients    α₀ … α_N of powers of s, the unscaled score; if rows have their own, only N is used
    divisor         "sum": D = row sum + eps; "count": the number of visible keys; "one"
    narrow          y in bf16, with its rounding error in a second tensor; else in fp32
    """

    coefficients: tuple[float, ...]
    divisor: str
    eps: float
    chunk: int
    narrow: bool = False

    @property
    def order(self) -> int:
        return len(self.coefficients) - 1

    @property
    def by_sum(self) -> bool:
        return self.divisor == "sum"


class Gradients(NamedTuple):
    """Gradients of q, k, v in their dtypes, of α and of the log forget gate in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor | None
    log_forget: Tensor | None


class Rows(NamedTuple):
    """Optional numbers per token: α [N+1, B, H, T] and the log forget gate [B, K, T], both fp32."""

    alpha: Tensor | None = None
    log_forget: Tensor | None = None


@on_its_device
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Rows,
    call: Call,
    *,
    initial: Moments | None = None,
    totals: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Moments, Moments | None]:
    """Causal y [B, T, H, e], its rounding error, D [B, H, T] in fp32, the moments of the keys for `backward`, and, with
    `totals`, the moments after the text.

    `initial` are the totals of an earlier text.
    """
    batch, tokens, heads, _ = q.shape
    log = _chunk_totals(rows.log_forget, q, call.chunk)
    past, after = moments(
        _keys_side(k, v, log, call),
        call.order,
        call.chunk,
        sums=call.by_sum,
        initial=initial,
        totals=totals,
    )
    y, rest = empty_rows(q, v, call.narrow)
    divisor = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    launch = _forward_launch(
        Layout.of(q), Layout.of(k), Layout.of(v), call, TILES["forward"], past.small.shape[1],
        rows.alpha is not None, log is not None, initial is not None,
    )  # fmt: skip
    launch(q, k, v, rows.alpha, log, *_pointers(past), y, rest, divisor)
    return y, rest, divisor, past, after


@lru_cache(maxsize=MOST_SHAPES)
def _forward_launch(
    q: Layout, k: Layout, v: Layout, call: Call, tiles: tuple[Tile, Tile], chunks: int, scaled: bool, decays: bool, started: bool
) -> Launch:  # fmt: skip
    batch, tokens, heads, _ = q.shape
    y = Layout.contiguous((*q.shape[:3], v.shape[3]), torch.float32)
    tile = _tile(tiles, "forward", q, v, call, crowded=scaled or decays)
    numbers = (
        q.strides[:3], k.strides[:3], v.strides[:3], y.strides[:3], tokens, heads, chunks, batch * heads * tokens, call.eps
    )  # fmt: skip
    options = {
        **_sizes(q, k, v, call, scaled=scaled, decays=decays),
        **tile,
        "BY_COUNT": call.divisor == "count",
        "NARROW": call.narrow,
        "STARTED": started,
    }
    return prepared(forward_rows, (cdiv(tokens, tile["BM"]), batch * heads), numbers, options)


@on_its_device
def backward(
    dy: Tensor,
    d_divisor: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    rest: Tensor | None,
    divisor: Tensor,
    rows: Rows,
    past: Moments,
    call: Call,
    *,
    started: bool = False,
    totals: Moments | None = None,
    d_totals: Moments | None = None,
) -> tuple[Gradients, Moments | None]:
    """All gradients; if the text was `started`, also the gradient of its initial totals.

    d_totals is the gradient of the totals after the text; with a forget gate it needs these `totals` too.
    """
    batch, tokens, heads, _ = q.shape
    kv_heads, chunks = k.shape[2], past.small.shape[1]
    log = _chunk_totals(rows.log_forget, q, call.chunk)
    dn, dz = quotient_backward(dy, y, rest, divisor, v, by_sum=call.by_sum)
    if dz is not None and d_divisor is not None:
        dz = dz + d_divisor
    dq, dk, dv = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for u in (q, k, v))
    d_alpha = None if rows.alpha is None else torch.empty_like(rows.alpha)
    strides = (q.stride()[:3], k.stride()[:3], v.stride()[:3], dn.stride()[:3])
    shape = (tokens, heads, chunks, batch * heads * tokens)
    scaled, crowded = rows.alpha is not None, rows.alpha is not None or rows.log_forget is not None
    sizes = _sizes(q, k, v, call, scaled=scaled, decays=rows.log_forget is not None)
    of_rows = None if log is None else torch.empty(batch, heads, tokens, dtype=log.dtype, device=q.device)
    tile = _tile(TILES["queries"], "queries", q, v, call, crowded=crowded)
    backward_queries[(cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, dn, dz, rows.alpha, log, *_pointers(past), lower_sums(q, call.order), dq, d_alpha, of_rows,
        *strides, dq.stride()[:3], *shape, **sizes, **tile, STARTED=started,
    )  # fmt: skip
    later, before = moments(
        _queries_side(q, dn, dz, rows.alpha, log, heads // kv_heads, call),
        call.order,
        call.chunk,
        sums=call.by_sum,
        reverse=True,
        initial=None if d_totals is None else _by_coefficients(d_totals, q, v, call, scaled, inverse=True),
        totals=started,
    )
    of_keys = None if log is None else torch.empty_like(log)
    left = None if log is None else _chunk_ends(log, call.chunk) - log
    tile = _tile(TILES["keys"], "keys", q, v, call, crowded=crowded)
    backward_keys[(cdiv(tokens, tile["BN"]), batch * kv_heads)](
        q, k, v, dn, dz, rows.alpha, log, left, *_pointers(later), lower_sums(k, call.order), dk, dv, of_keys,
        *strides, dk.stride()[:3], dv.stride()[:3], *shape, **sizes, **tile, STARTED=d_totals is not None,
    )  # fmt: skip
    d_forget = None
    if of_keys is not None and of_rows is not None:
        crossing = _crossing(past, later, q, v, call, scaled)
        end = torch.zeros_like(past.small[:, 0, 0])
        if totals is not None and d_totals is not None:  # every gate also decays the totals
            end = _inner(totals, d_totals, q.shape[3])
        crossing = torch.cat([crossing, end[:, None]], 1).view(batch, kv_heads, -1)
        within = of_rows.unflatten(1, (kv_heads, -1)).sum(2) - of_keys
        d_forget = _of_gates(within, crossing, call.chunk)
    d_initial = None if before is None else _by_coefficients(before, q, v, call, scaled, inverse=False)
    return Gradients(dq, dk, dv, d_alpha, d_forget), d_initial


def _of_gates(within: Tensor, crossing: Tensor, chunk: int) -> Tensor:
    """The gradient of ln f_t [B, K, T]: Σ g w over all pairs of a key before t and a query from t on.

    It is the sum of `within` (rows minus keys) from t to the end of the chunk, plus the pairs that cross that end.
    """
    tokens = within.shape[-1]
    padded = torch.nn.functional.pad(within.double(), (0, -tokens % chunk)).unflatten(-1, (-1, chunk))
    total = padded.flip(-1).cumsum(-1).flip(-1) + crossing[..., None]
    return total.flatten(-2)[..., :tokens].float()


def _crossing(past: Moments, later: Moments, q: Tensor, v: Tensor, call: Call, scaled: bool) -> Tensor:
    """Σ g w of all pairs that cross the end of a chunk, for each chunk but the last, [B·K, chunks − 1]."""
    d, c = q.shape[3], (1.0,) * (call.order + 1) if scaled else call.coefficients
    small = _by_coefficients(Moments(later.small[:, :-1], {}), q, v, call, scaled, inverse=False).small
    found = (past.small[:, 1:] * small).sum(-1)
    for n in range(2, call.order + 1):
        found = found + c[n] * across(past, later, n, d)
    return found


def _inner(totals: Moments, other: Moments, d: int) -> Tensor:
    """The inner product of two moments over all entries, [B·K]."""
    found = (totals.small * other.small).sum(-1)
    for n, block in totals.high.items():
        products = (block * other.high[n]).sum(-1)
        found = found + (products * times_counted(d, n, block.device)).sum(-1)
    return found


def _by_coefficients(
    totals: Moments, q: Tensor, v: Tensor, call: Call, scaled: bool, *, inverse: bool
) -> Moments:
    """Convert moments of queries to gradients of a state: order n times its coefficient; or back, if `inverse`.

    If rows have their own coefficients, the moments already contain them.
    """
    if scaled:
        return totals
    c = [1 / c if inverse and c else c for c in (*call.coefficients, 0.0, 0.0)]
    d, e = q.shape[3], v.shape[3]
    parts = totals.small.split([d * e, e, d * d, d, 1], dim=-1)
    factors = (c[1], c[0], c[2], c[1], c[0])
    small = torch.cat([part * factor for part, factor in zip(parts, factors, strict=True)], -1)
    return Moments(small, {n: u * c[n] for n, u in totals.high.items()})


def _keys_side(k: Tensor, v: Tensor, log: Tensor | None, call: Call) -> Side:
    """Keys and values, weighted by their decay up to the end of their chunk."""
    if log is None:
        return Side(k, v)
    ends = _chunk_ends(log, call.chunk)
    weights = (ends - log).exp().float().expand(call.order + 1, *log.shape).contiguous()
    return Side(k, v, _three(weights), carry=_carry(ends, call.chunk))


def _queries_side(
    q: Tensor, dn: Tensor, dz: Tensor | None, alpha: Tensor | None, log: Tensor | None, group: int, call: Call
) -> Side:
    """Queries and their gradients, weighted by the decay from the start of their chunk."""
    weights, carry = alpha, None
    if log is not None:
        seen = log.exp().float().repeat_interleave(group, 1)
        weights = (seen.expand(call.order + 1, *seen.shape) if alpha is None else alpha * seen).contiguous()
        carry = _carry(_chunk_ends(log, call.chunk), call.chunk)
    return Side(q, dn, None if weights is None else _three(weights), dz, carry, group)


def _three(weights: Tensor) -> Tensor:
    """The weights, extended to orders 0 to 2 if there are fewer: the program of the small moments reads three."""
    missing = 3 - weights.shape[0]
    return weights if missing <= 0 else torch.cat([weights, weights[:missing]])


def _chunk_totals(log_forget: Tensor | None, q: Tensor, chunk: int) -> Tensor | None:
    """L: the running total of the log forget gate from the start of each chunk; in fp64 for q in fp32."""
    if log_forget is None:
        return None
    tokens = log_forget.shape[-1]
    padded = torch.nn.functional.pad(log_forget.double(), (0, -tokens % chunk))
    totals = padded.unflatten(-1, (-1, chunk)).cumsum(-1)
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    return totals.flatten(-2)[..., :tokens].to(wide).contiguous()


def _chunk_ends(log: Tensor, chunk: int) -> Tensor:
    """L at the last token of every token's chunk."""
    tokens = log.shape[-1]
    last = (torch.arange(tokens, device=log.device) // chunk * chunk + chunk - 1).clamp(max=tokens - 1)
    return log[..., last]


def _carry(ends: Tensor, chunk: int) -> Tensor:
    """The decay of the past over each chunk."""
    return ends[..., ::chunk].exp().float().contiguous()


def _pointers(past: Moments) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return past.small, past.high.get(2), past.high.get(3)


def _sizes(
    q: Tensor | Layout, k: Tensor | Layout, v: Tensor | Layout, call: Call, *, scaled: bool, decays: bool
) -> dict:
    d, e = q.shape[3], v.shape[3]
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "D": d,
        "E": e,
        "BD": width(d),
        "BE": width(e),
        "CHUNK": call.chunk,
        "C": call.coefficients,
        "ORDER": call.order,
        "ROWS2": block_rows(d, 2),
        "ROWS3": block_rows(d, 3),
        "P": together(d, 3),
        "ROWS": scaled,
        "DECAY": decays,
        "BY_SUM": call.by_sum,
        **operand_options(q),
    }


def _tile(
    tiles: tuple[Tile, Tile], kind: str, q: Tensor | Layout, v: Tensor | Layout, call: Call, *, crowded: bool
) -> dict[str, int]:
    """A tile that divides the chunk; smaller for fp32 and for numbers per row (`crowded`), which take registers."""
    options = tile_options(tiles, q, v, call.chunk)
    if q.dtype != torch.bfloat16:  # the axis whose sums stay in registers is short
        queries, keys = (32, 16) if kind == "keys" else (16, 32)
        return {**options, "BM": min(queries, call.chunk), "BN": min(keys, call.chunk), "num_warps": 8}
    return {**options, "BM": min(32 if kind == "keys" else 64, options["BM"])} if crowded else options
