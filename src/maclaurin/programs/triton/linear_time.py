"""Attention whose weights are a polynomial of low order, in time linear in the text.

    w_ts = e^{L_t − L_s} Σ_n α_n(t) (q·k)ⁿ,      y_t = Σ_{s≤t} w_ts v_s / D_t,      D_t = Σ_s w_ts + eps, t, or 1

The text is cut into chunks. Queries read the keys of their own chunk pair by pair, and all earlier keys through
moments (moments.py). L is the running total of the log forget gate within a chunk; α are constants, or one number
per order and row.

Backward, with dn = dy/D, dz = dD − Σ dy∘y/D and g_ts = e^{L_t − L_s}(dn_t·v_s + dz_t):

    r⁽ⁿ⁾_t = Σ_s g_ts (q·k)ⁿ⁻¹ k_s,     dq = Σ_n n α_n r⁽ⁿ⁾,     dα_n = q·r⁽ⁿ⁾,   dα₀ = Σ_s g_ts

and keys and values read the moments of (q, dn, dz) over all later chunks in the same way. Without a causal mask, every
query reads the moments of all keys, every key those of all queries, and there are no pairs. Moments are stored in blocks
that belong to one entry (block_layout.py), so both directions are sums over entries:

    φ(q)·S = Σ_a q_a Q S_a,             Σ_s g (q·k)ⁿ⁻¹ k from Σ_a q_a dn S_aᵀ,        Q = q, or products of two
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from maclaurin.programs.triton import on_its_device
from maclaurin.programs.triton.block_layout import (
    block_of,
    block_rows,
    contracted,
    entry,
    group_of,
    members_of,
    products,
    times_counted,
    together,
)
from maclaurin.programs.triton.launch import Launch, Layout, by_shapes, launched, prepared
from maclaurin.programs.triton.moments import Moments, Side, across, moments
from maclaurin.programs.triton.pair_moments import (
    add_block,
    lower_sums,
    pairs_times,
    read_both,
    read_pairs,
    sums_at,
)
from maclaurin.programs.triton.rows import quotient_backward
from maclaurin.programs.triton.tiles import (
    Tile,
    cdiv,
    divisor_of,
    empty_rows,
    load_rows,
    operand_options,
    store_rows,
    tile_options,
    width,
)

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
    causal          else all keys are seen; without a state, a forget gate or coefficients per row
    """

    coefficients: tuple[float, ...]
    divisor: str
    eps: float
    chunk: int
    narrow: bool = False
    causal: bool = True

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
    """y [B, T, H, e], its rounding error, D [B, H, T] in fp32, the moments of the keys for `backward`, and, with
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
        whole=not call.causal,
    )
    y, rest = empty_rows(q, v, call.narrow)
    divisor = torch.empty(batch, heads, tokens, dtype=torch.float32, device=q.device)
    launch = _forward_launch(
        Layout.of(q), Layout.of(k), Layout.of(v), call, TILES["forward"], past.small.shape[1],
        rows.alpha is not None, log is not None, initial is not None or not call.causal,
    )  # fmt: skip
    launch(q, k, v, rows.alpha, log, *_pointers(past), y, rest, divisor)
    return y, rest, divisor, past, after


@by_shapes
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
        *strides, dq.stride()[:3], *shape, **sizes, **tile, STARTED=started or not call.causal,
    )  # fmt: skip
    later, before = moments(
        _queries_side(q, dn, dz, rows.alpha, log, heads // kv_heads, call),
        call.order,
        call.chunk,
        sums=call.by_sum,
        reverse=True,
        initial=None if d_totals is None else _by_coefficients(d_totals, q, v, call, scaled, inverse=True),
        totals=started,
        whole=not call.causal,
    )
    of_keys = None if log is None else torch.empty_like(log)
    left = None if log is None else _chunk_ends(log, call.chunk) - log
    tile = _tile(TILES["keys"], "keys", q, v, call, crowded=crowded)
    backward_keys[(cdiv(tokens, tile["BN"]), batch * kv_heads)](
        q, k, v, dn, dz, rows.alpha, log, left, *_pointers(later), lower_sums(k, call.order), dk, dv, of_keys,
        *strides, dk.stride()[:3], dv.stride()[:3], *shape, **sizes, **tile, STARTED=d_totals is not None or not call.causal,
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
        "CAUSAL": call.causal,
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


# --------------------------------------------------------- in registers: weights of scores, sums over moments


@triton.jit
def coefficient(ALPHA, n: tl.constexpr, C: tl.constexpr, rows, all_rows, m, T, ROWS: tl.constexpr):
    """α_n of the rows m."""
    if ROWS:
        alpha = tl.load(ALPHA + n * all_rows + rows + m, mask=m < T, other=0.0)
    else:
        alpha = tl.zeros(m.shape, tl.float32) + C[n]
    return alpha


@triton.jit
def log_decay(LOG, rows, n, T, DECAY: tl.constexpr):
    """L of the tokens n; fp64 for fp32 inputs, because a difference of fp32 totals would lose precision."""
    if DECAY:
        log = tl.load(LOG + rows + n, mask=n < T, other=0.0)
    else:
        log = tl.zeros(n.shape, tl.float32)
    return log


@triton.jit
def left_of(log_t, log_s):
    """e^{L_t − L_s}, the decay from s to t; at most 1, also for t < s."""
    return tl.exp(tl.minimum((log_t - log_s).to(tl.float32), 0.0))


@triton.jit
def weights(s, a0, a1, a2, a3, ORDER: tl.constexpr):
    """Σ α_n sⁿ by Horner's rule."""
    if ORDER == 1:
        w = a1 * s + a0
    elif ORDER == 2:
        w = (a2 * s + a1) * s + a0
    else:
        w = ((a3 * s + a2) * s + a1) * s + a0
    return w


@triton.jit
def slopes(s, a1, a2, a3, ORDER: tl.constexpr):
    """Σ n α_n sⁿ⁻¹."""
    if ORDER == 1:
        slope = a1 + tl.zeros(s.shape, tl.float32)
    elif ORDER == 2:
        slope = 2 * a2 * s + a1
    else:
        slope = (3 * a3 * s + 2 * a2) * s + a1
    return slope


@triton.jit
def times_square(x, Z, d, D: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x Z for a symmetric Z [d, d] in fp32, as two products, of rounded Z and of the rest, for row sums in fp32."""
    inside = (d < D)[:, None] & (d < D)[None, :]
    z = tl.load(Z + d[:, None] * D + d[None, :], mask=inside, other=0.0)
    high = z.to(OPERAND)
    rest = (z - high.to(tl.float32)).to(OPERAND)
    return tl.dot(x, rest, tl.dot(x, high, input_precision=PRECISION), input_precision=PRECISION)


# ------------------------------------------------------------------------------------------------------- rows


@triton.jit
def _add_keys(acc, z, q, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
              D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, ORDER: tl.constexpr, DECAY: tl.constexpr,
              MASKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the sums of a tile of queries."""
    n = start + tl.arange(0, BN)
    k, v = load_rows(K, k_t, n, d, T, D).to(OPERAND), load_rows(V, v_t, n, e, T, E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
    if DECAY:
        w *= left_of(log[:, None], log_decay(LOG, log_at, n, T, DECAY)[None, :])
    if MASKED:
        w = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], w, 0.0)
    w = w.to(OPERAND)
    z += tl.sum(w.to(tl.float32), 1)  # of the rounded weights, so that those in the product sum to one
    return tl.dot(w, v, acc, input_precision=PRECISION), z


@launched
@triton.jit
def forward_rows(
    Q, K, V, ALPHA, LOG, SMALL, S2, S3, Y, REST, DIVISOR,
    q_strides, k_strides, v_strides, y_strides,
    T, H, chunks, all_rows, eps,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, BY_COUNT: tl.constexpr, NARROW: tl.constexpr, STARTED: tl.constexpr, CAUSAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y and D of a tile of queries of one head."""
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
    tl.static_assert(not (BY_SUM and ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    chunk = first // CHUNK if CAUSAL else 0
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_at, rows = Q + b * q_b + h * q_h, (b * H + h) * T
    heads = H // GROUP
    past = (b * heads + g) * chunks + chunk
    q = load_rows(q_at, q_t, m, d, T, D).to(OPERAND)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a0
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    there = 1 if STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    if ORDER > 2:
        at = S3 + past * ROWS3 * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            q2 = products(q_at, q_t, m, group, T, D, BD, P, OPERAND)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * P, 2.0, 1.0)
                acc = add_block(acc, q2, factor, block_of(at, a, c, e, D, E, BD, P), PRECISION)
            at += held * P * D * E
        acc *= a3[:, None]
    if ORDER > 1:
        at = S2 + past * ROWS2 * E
        acc += a2[:, None] * read_pairs(q, q_at + m * q_t, m < T, at, there, e, D, E, PRECISION)
    small = SMALL + past * (D * E + E + D * D + D + 1)
    one = tl.dot(q, block_of(small, 0, d, e, D, E, BD, 1).to(OPERAND), input_precision=PRECISION)
    zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
    acc += a1[:, None] * one + a0[:, None] * zero[None, :]
    if BY_SUM:
        at = small + D * E + E
        z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
        row = a1[:, None] * z_first[None, :]
        if ORDER > 1:
            row += a2[:, None] * times_square(q, at, d, D, OPERAND, PRECISION)
        z = tl.sum(q.to(tl.float32) * row, 1) + a0 * tl.load(at + D * D + D)
    if DECAY:
        past_left = tl.exp(log.to(tl.float32))
        acc *= past_left[:, None]
        z *= past_left
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    if CAUSAL:
        whole = first // BN * BN  # keys before this need no mask
        for start in range(chunk * CHUNK, whole, BN):
            acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                               D, E, BN, ORDER, DECAY, False, OPERAND, PRECISION)  # fmt: skip
        for start in range(whole, tl.minimum(first + BM, T), BN):
            acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                               D, E, BN, ORDER, DECAY, True, OPERAND, PRECISION)  # fmt: skip
    divisor = divisor_of(z, m + 1 if CAUSAL else m * 0 + T, eps, BY_SUM, BY_COUNT)
    inside = (m < T)[:, None] & (e < E)[None, :]
    at = b * y_b + h * y_h + m[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc / divisor[:, None], inside, NARROW)
    tl.store(DIVISOR + rows + m, divisor, mask=m < T)


# -------------------------------------------------------------------------------------------------- gradients


@triton.jit
def _add_keys_to_gradient(dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
              D: tl.constexpr, E: tl.constexpr, BN: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr,
              DECAY: tl.constexpr, BY_SUM: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the gradients of a tile of queries."""
    n = start + tl.arange(0, BN)
    k, v = load_rows(K, k_t, n, d, T, D).to(OPERAND), load_rows(V, v_t, n, e, T, E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad = tl.dot(dn, tl.trans(v), input_precision=PRECISION)
    if BY_SUM:
        grad += dz[:, None]
    if DECAY:
        grad *= left_of(log[:, None], log_decay(LOG, log_at, n, T, DECAY)[None, :])
    if MASKED:
        grad = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], grad, 0.0)
    if ROWS:
        da0 += tl.sum(grad, 1)
        da1 += tl.sum(grad * s, 1)
        if ORDER > 1:
            da2 += tl.sum(grad * s * s, 1)
        if ORDER > 2:
            da3 += tl.sum(grad * s * s * s, 1)
    if DECAY:
        w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], ORDER)
        of_weights += tl.sum(grad * w, 1).to(of_weights.dtype)
    ds = grad * slopes(s, a1[:, None], a2[:, None], a3[:, None], ORDER)
    return tl.dot(ds.to(OPERAND), k, dq, input_precision=PRECISION), da0, da1, da2, da3, of_weights


@launched
@triton.jit
def backward_queries(
    Q, K, V, DN, DZ, ALPHA, LOG, SMALL, S2, S3, LOWER, DQ, DALPHA, DROW,
    q_strides, k_strides, v_strides, n_strides, dq_strides,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, CAUSAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dα if rows have their own, and Σ_s g w (the derivative of the loss by a common factor of a row's weights)."""
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dq_b, dq_t, dq_h = dq_strides
    tl.static_assert(not (BY_SUM and ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // GROUP
    chunk = first // CHUNK if CAUSAL else 0
    m = first + tl.arange(0, BM)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    q_at, rows = Q + b * q_b + h * q_h, (b * H + h) * T
    heads = H // GROUP
    past = (b * heads + g) * chunks + chunk
    q = load_rows(q_at, q_t, m, d, T, D).to(OPERAND)
    dn = load_rows(DN + b * n_b + h * n_h, n_t, m, e, T, E).to(OPERAND)
    dz = tl.load(DZ + rows + m, mask=m < T, other=0.0) if BY_SUM else tl.zeros((BM,), tl.float32)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS) if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS) if ORDER > 2 else a0
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, DECAY)
    dq = tl.zeros((BM, BD), tl.float32)
    da0 = tl.zeros((BM,), tl.float32)
    da1, da2, da3 = da0, da0, da0
    there = 1 if STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    small = SMALL + past * (D * E + E + D * D + D + 1)
    at = small + D * E + E
    if ORDER > 2:
        third = tl.zeros((BM, BD), tl.float32)
        at3 = S3 + past * ROWS3 * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            total = tl.zeros((BM, P * BD), tl.float32)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * P, 2.0, 1.0)
                block = tl.trans(block_of(at3, a, c, e, D, E, BD, P))
                total = add_block(total, dn, factor, block, PRECISION)
            third += contracted(total, group_of(q_at, q_t, m, group, T, D, P), BD, P)
            at3 += held * P * D * E
        da3 = tl.sum(third * q.to(tl.float32), 1)
        dq += 3 * a3[:, None] * third
    if ORDER > 1:
        at2 = S2 + past * ROWS2 * E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * H + h, m, T)
        second = pairs_times(dn, q_at + m * q_t, m < T, at2, there, LOWER, T, e, D, E, BD, PRECISION)
        if BY_SUM:
            second += dz[:, None] * times_square(q, at, d, D, OPERAND, PRECISION)
        da2 = tl.sum(second * q.to(tl.float32), 1)
        dq += 2 * a2[:, None] * second
    one = tl.dot(dn, tl.trans(block_of(small, 0, d, e, D, E, BD, 1)).to(OPERAND), input_precision=PRECISION)
    if BY_SUM:
        one += dz[:, None] * tl.load(at + D * D + d, mask=d < D, other=0.0)[None, :]
    da1 = tl.sum(one * q.to(tl.float32), 1)
    dq += a1[:, None] * one
    if ROWS or DECAY:
        zero = tl.load(small + D * E + e, mask=e < E, other=0.0)
        da0 = tl.sum(dn.to(tl.float32) * zero[None, :], 1)
        if BY_SUM:
            da0 += dz * tl.load(at + D * D + D)
    if DECAY:
        past_left = tl.exp(log.to(tl.float32))
        dq *= past_left[:, None]
        da0, da1, da2, da3 = da0 * past_left, da1 * past_left, da2 * past_left, da3 * past_left
    of_weights = (a0 * da0 + a1 * da1 + a2 * da2 + a3 * da3).to(log.dtype)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    if CAUSAL:
        whole = first // BN * BN  # keys before this need no mask
        for start in range(chunk * CHUNK, whole, BN):
            dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
                dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                D, E, BN, ORDER, ROWS, DECAY, BY_SUM, False, OPERAND, PRECISION,
            )  # fmt: skip
        for start in range(whole, tl.minimum(first + BM, T), BN):
            dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
                dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                D, E, BN, ORDER, ROWS, DECAY, BY_SUM, True, OPERAND, PRECISION,
            )  # fmt: skip
    inside = (m < T)[:, None] & (d < D)[None, :]
    at = DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :]
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=inside)
    if ROWS:
        tl.store(DALPHA + rows + m, da0, mask=m < T)
        tl.store(DALPHA + all_rows + rows + m, da1, mask=m < T)
        if ORDER > 1:
            tl.store(DALPHA + 2 * all_rows + rows + m, da2, mask=m < T)
        if ORDER > 2:
            tl.store(DALPHA + 3 * all_rows + rows + m, da3, mask=m < T)
    if DECAY:
        tl.store(DROW + rows + m, of_weights, mask=m < T)


@triton.jit
def _add_queries(dk, dv, of_weights, k, v, n, log_s, Q, DN, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                 d, e, T, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
                 ROWS: tl.constexpr, DECAY: tl.constexpr, BY_SUM: tl.constexpr, MASKED: tl.constexpr,
                 OPERAND: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add one tile of queries of the same chunk to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for q, dn and dz and add nothing; gradients of keys beyond it are not stored.
    """
    m = start + tl.arange(0, BM)
    q, dn = load_rows(Q, q_t, m, d, T, D).to(OPERAND), load_rows(DN, n_t, m, e, T, E).to(OPERAND)
    a0 = coefficient(ALPHA, 0, C, rows, all_rows, m, T, ROWS)[None, :]
    a1 = coefficient(ALPHA, 1, C, rows, all_rows, m, T, ROWS)[None, :]
    a2 = coefficient(ALPHA, 2, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 1 else a0
    a3 = coefficient(ALPHA, 3, C, rows, all_rows, m, T, ROWS)[None, :] if ORDER > 2 else a0
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    w = weights(s, a0, a1, a2, a3, ORDER)
    slope = slopes(s, a1, a2, a3, ORDER)
    if DECAY:
        left = left_of(log_decay(LOG, of_key, m, T, DECAY)[None, :], log_s[:, None])
        w, slope = w * left, slope * left
    seen = n[:, None] <= m[None, :]
    if MASKED:
        w = tl.where(seen, w, 0.0)
    dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
    grad = tl.dot(v, tl.trans(dn), input_precision=PRECISION)
    if BY_SUM:
        grad += tl.load(DZ + rows + m, mask=m < T, other=0.0)[None, :]
    if DECAY:
        of_weights += tl.sum(w * grad, 1).to(
            of_weights.dtype
        )  # unrounded weights: sums along the text cancel
    ds = grad * slope
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(OPERAND), q, dk, input_precision=PRECISION), dv, of_weights


@launched
@triton.jit
def backward_keys(
    Q, K, V, DN, DZ, ALPHA, LOG, LEFT, SMALL, S2, S3, LOWER, DK, DV, DKEY,
    q_strides, k_strides, v_strides, n_strides, dk_strides, dv_strides,
    T, H, chunks, all_rows,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    CHUNK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, ORDER: tl.constexpr,
    ROWS2: tl.constexpr, ROWS3: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, DECAY: tl.constexpr,
    BY_SUM: tl.constexpr, STARTED: tl.constexpr, CAUSAL: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv, and Σ_t g w (the derivative of the loss by a common factor of a key's weights), for one key-value head.

    The moments are those of (q, dn, dz) over later chunks. If rows have their own coefficients, the moments already
    contain them. LEFT is the log decay from a key to the end of its chunk.
    """
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    tl.static_assert(not (BY_SUM and ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * BN
    heads = H // GROUP
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    chunk = first // CHUNK if CAUSAL else 0
    n = first + tl.arange(0, BN)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    k, v = load_rows(k_at, k_t, n, d, T, D).to(OPERAND), load_rows(v_at, v_t, n, e, T, E).to(OPERAND)
    of_key = (b * heads + g) * T
    log_s = log_decay(LOG, of_key, n, T, DECAY)
    later = (b * heads + g) * chunks + chunk
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    of_weights = tl.zeros((BN,), log_s.dtype)
    there = 1 if STARTED else (chunk < chunks - 1).to(tl.int32)  # no branch: it would serialize wgmma
    c0 = 1.0 if ROWS else C[0]
    c1 = 1.0 if ROWS else C[1]
    small = SMALL + later * (D * E + E + D * D + D + 1)
    at = small + D * E + E
    if ORDER > 2:
        c3 = 1.0 if ROWS else C[3]
        at3 = S3 + later * ROWS3 * E
        c = tl.arange(0, P * BD)
        for group in range((D + P - 1) // P * there):
            k2 = products(k_at, k_t, n, group, T, D, BD, P, OPERAND)
            total = tl.zeros((BN, P * BD), tl.float32)
            members, held = members_of(group, D, P)
            for a in range(members):
                factor = entry(k_at, k_t, a, n, T) * tl.where(a < group * P, 2.0, 1.0)
                block = block_of(at3, a, c, e, D, E, BD, P)
                dv = add_block(dv, k2, factor, block, PRECISION)
                total = add_block(total, v, factor, tl.trans(block), PRECISION)
            dk += contracted(total, group_of(k_at, k_t, n, group, T, D, P), BD, P)
            at3 += held * P * D * E
        dv *= c3
        dk *= 3 * c3
    if ORDER > 1:
        c2 = 1.0 if ROWS else C[2]
        at2 = S2 + later * ROWS2 * E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * heads + g, n, T)
        of_v, of_k = read_both(k, v, k_at + n * k_t, n < T, at2, there, LOWER, T, e, D, E, PRECISION)
        if BY_SUM:
            row = times_square(k, at, d, D, OPERAND, PRECISION)
            of_k += row
            of_weights += c2 * tl.sum(row * k.to(tl.float32), 1)
        dv += c2 * of_v
        dk += 2 * c2 * of_k
    block = block_of(small, 0, d, e, D, E, BD, 1).to(OPERAND)
    dv += c1 * tl.dot(k, block, input_precision=PRECISION)
    dv += c0 * tl.load(small + D * E + e, mask=e < E, other=0.0)[None, :]
    dk += c1 * tl.dot(v, tl.trans(block), input_precision=PRECISION)
    if BY_SUM:
        z_first = tl.load(at + D * D + d, mask=d < D, other=0.0)
        dk += c1 * z_first[None, :]
        of_weights += c1 * tl.sum(k.to(tl.float32) * z_first[None, :], 1) + c0 * tl.load(at + D * D + D)
    if DECAY:
        at_end = tl.exp(log_decay(LEFT, of_key, n, T, DECAY).to(tl.float32))
        dk, dv = dk * at_end[:, None], dv * at_end[:, None]
        of_weights = of_weights * at_end + tl.sum(dv * v.to(tl.float32), 1)
    if CAUSAL:
        whole = tl.cdiv(first + BN, BM) * BM  # from here on, queries see the whole tile
        end = tl.minimum((chunk + 1) * CHUNK, T)
        for member in range(GROUP):
            h = g * GROUP + member
            q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * T
            for start in range(first // BM * BM, tl.minimum(whole, end), BM):
                dk, dv, of_weights = _add_queries(
                    dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                    d, e, T, D, E, BM, C, ORDER, ROWS, DECAY, BY_SUM, True, OPERAND, PRECISION,
                )  # fmt: skip
            for start in range(whole, end, BM):
                dk, dv, of_weights = _add_queries(
                    dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                    d, e, T, D, E, BM, C, ORDER, ROWS, DECAY, BY_SUM, False, OPERAND, PRECISION,
                )  # fmt: skip
    inside_d, inside_e = (n < T)[:, None] & (d < D)[None, :], (n < T)[:, None] & (e < E)[None, :]
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if DECAY:
        tl.store(DKEY + of_key + n, of_weights, mask=n < T)
