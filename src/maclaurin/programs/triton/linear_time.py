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

from typing import Any, NamedTuple

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
    with_settings,
)

#: tiles by pass for head sizes up to 64 and up to 128
TILES = {
    "forward": (Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
    "queries": (Tile(64, 32, 4, 3), Tile(128, 64, 8, 3)),
    "keys": (Tile(64, 64, 4, 3), Tile(32, 128, 8, 3)),
}


class Settings(NamedTuple):
    """The compile-time arguments of the three passes (S in kernels).

    GROUP                 query heads per key-value head
    D, E, BD, BE          sizes of keys and values, and of their tiles
    BM, BN                queries and keys per tile
    CHUNK                 tokens per chunk
    C, ORDER              coefficients of all rows, and the highest power
    ROWS2, ROWS3          rows of the blocks of orders 2 and 3
    P                     entries b of one block of order 3
    ROWS, DECAY           whether rows have their own coefficients, and whether there is a forget gate
    BY_SUM, BY_COUNT      what rows are divided by
    CAUSAL, STARTED       whether there is a causal mask, and moments for the first chunk that is read
    NARROW                whether y has a rounding error
    OPERAND, PRECISION    how products are computed (tiles.py)
    """

    GROUP: int
    D: int
    E: int
    BD: int
    BE: int
    BM: int
    BN: int
    CHUNK: int
    C: tuple[float, ...]
    ORDER: int
    ROWS2: int
    ROWS3: int
    P: int
    ROWS: bool
    DECAY: bool
    BY_SUM: bool
    BY_COUNT: bool
    CAUSAL: bool
    STARTED: bool
    NARROW: bool
    OPERAND: Any
    PRECISION: Any


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
        rows.alpha is not None, log is not None, initial is not None,
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
    settings = _settings(q, k, v, call, tile, scaled=scaled, decays=decays, started=started)
    settings = settings._replace(BY_COUNT=call.divisor == "count", NARROW=call.narrow)
    grid = cdiv(tokens, tile["BM"]), batch * heads
    return prepared(forward_rows, grid, numbers, with_settings(settings, tile))


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
    scaled, decays = rows.alpha is not None, log is not None
    of_rows = None if log is None else torch.empty(batch, heads, tokens, dtype=log.dtype, device=q.device)
    tile = _tile(TILES["queries"], "queries", q, v, call, crowded=scaled or decays)
    settings = _settings(q, k, v, call, tile, scaled=scaled, decays=decays, started=started)
    backward_queries[(cdiv(tokens, tile["BM"]), batch * heads)](
        q, k, v, dn, dz, rows.alpha, log, *_pointers(past), lower_sums(q, call.order), dq, d_alpha, of_rows,
        *strides, dq.stride()[:3], *shape, **with_settings(settings, tile),
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
    tile = _tile(TILES["keys"], "keys", q, v, call, crowded=scaled or decays)
    settings = _settings(q, k, v, call, tile, scaled=scaled, decays=decays, started=d_totals is not None)
    backward_keys[(cdiv(tokens, tile["BN"]), batch * kv_heads)](
        q, k, v, dn, dz, rows.alpha, log, left, *_pointers(later), lower_sums(k, call.order), dk, dv, of_keys,
        *strides, dk.stride()[:3], dv.stride()[:3], *shape, **with_settings(settings, tile),
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


def _settings(
    q: Tensor | Layout,
    k: Tensor | Layout,
    v: Tensor | Layout,
    call: Call,
    tile: dict[str, int],
    *,
    scaled: bool,
    decays: bool,
    started: bool,
) -> Settings:
    d, e = q.shape[3], v.shape[3]
    return Settings(
        GROUP=q.shape[2] // k.shape[2],
        D=d,
        E=e,
        BD=width(d),
        BE=width(e),
        BM=tile["BM"],
        BN=tile["BN"],
        CHUNK=call.chunk,
        C=call.coefficients,
        ORDER=call.order,
        ROWS2=block_rows(d, 2),
        ROWS3=block_rows(d, 3),
        P=together(d, 3),
        ROWS=scaled,
        DECAY=decays,
        BY_SUM=call.by_sum,
        BY_COUNT=False,
        CAUSAL=call.causal,
        STARTED=started or not call.causal,
        NARROW=False,
        **operand_options(q),
    )


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
def coefficients(ALPHA, rows, all_rows, m, T, S: tl.constexpr):
    """α₀ … α₃ of the rows m; those above the order are not used."""
    a0 = _coefficient(ALPHA, 0, rows, all_rows, m, T, S)
    a1 = _coefficient(ALPHA, 1, rows, all_rows, m, T, S)
    a2 = _coefficient(ALPHA, 2, rows, all_rows, m, T, S) if S.ORDER > 1 else a0
    a3 = _coefficient(ALPHA, 3, rows, all_rows, m, T, S) if S.ORDER > 2 else a0
    return a0, a1, a2, a3


@triton.jit
def _coefficient(ALPHA, n: tl.constexpr, rows, all_rows, m, T, S: tl.constexpr):
    """α_n of the rows m."""
    C: tl.constexpr = S.C
    if S.ROWS:
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
              S: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the sums of a tile of queries."""
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    n = start + tl.arange(0, S.BN)
    k, v = load_rows(K, k_t, n, d, T, S.D).to(OPERAND), load_rows(V, v_t, n, e, T, S.E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], S.ORDER)
    if S.DECAY:
        w *= left_of(log[:, None], log_decay(LOG, log_at, n, T, S.DECAY)[None, :])
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
    T, H, chunks, all_rows, eps, S: tl.constexpr,
):  # fmt: skip
    """y and D of a tile of queries of one head."""
    BE: tl.constexpr = S.BE
    BM: tl.constexpr = S.BM
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    y_b, y_t, y_h = y_strides
    tl.static_assert(not (S.BY_SUM and S.ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * S.BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    chunk = first // S.CHUNK if S.CAUSAL else 0
    m = first + tl.arange(0, S.BM)
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    q_at, rows = Q + b * q_b + h * q_h, (b * H + h) * T
    heads = H // S.GROUP
    past = (b * heads + g) * chunks + chunk
    q = load_rows(q_at, q_t, m, d, T, S.D).to(OPERAND)
    a0, a1, a2, a3 = coefficients(ALPHA, rows, all_rows, m, T, S)
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, S.DECAY)
    acc = tl.zeros((BM, BE), tl.float32)
    z = tl.zeros((BM,), tl.float32)
    there = 1 if S.STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    if S.ORDER > 2:
        at = S3 + past * S.ROWS3 * S.E
        c = tl.arange(0, S.P * S.BD)
        for group in range((S.D + S.P - 1) // S.P * there):
            q2 = products(q_at, q_t, m, group, T, S.D, S.BD, S.P, OPERAND)
            members, held = members_of(group, S.D, S.P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * S.P, 2.0, 1.0)
                acc = add_block(acc, q2, factor, block_of(at, a, c, e, S.D, S.E, S.BD, S.P), PRECISION)
            at += held * S.P * S.D * S.E
        acc *= a3[:, None]
    if S.ORDER > 1:
        at = S2 + past * S.ROWS2 * S.E
        acc += a2[:, None] * read_pairs(q, q_at + m * q_t, m < T, at, there, e, S.D, S.E, PRECISION)
    small = SMALL + past * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
    one = tl.dot(q, block_of(small, 0, d, e, S.D, S.E, S.BD, 1).to(OPERAND), input_precision=PRECISION)
    zero = tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)
    acc += a1[:, None] * one + a0[:, None] * zero[None, :]
    if S.BY_SUM:
        at = small + S.D * S.E + S.E
        z_first = tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)
        row = a1[:, None] * z_first[None, :]
        if S.ORDER > 1:
            row += a2[:, None] * times_square(q, at, d, S.D, OPERAND, PRECISION)
        z = tl.sum(q.to(tl.float32) * row, 1) + a0 * tl.load(at + S.D * S.D + S.D)
    if S.DECAY:
        past_left = tl.exp(log.to(tl.float32))
        acc *= past_left[:, None]
        z *= past_left
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    if S.CAUSAL:
        whole = first // S.BN * S.BN  # keys before this need no mask
        for start in range(chunk * S.CHUNK, whole, S.BN):
            acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                               S, False)  # fmt: skip
        for start in range(whole, tl.minimum(first + S.BM, T), S.BN):
            acc, z = _add_keys(acc, z, q, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                               S, True)  # fmt: skip
    divisor = divisor_of(z, m + 1 if S.CAUSAL else m * 0 + T, eps, S.BY_SUM, S.BY_COUNT)
    inside = (m < T)[:, None] & (e < S.E)[None, :]
    at = b * y_b + h * y_h + m[:, None] * y_t + e[None, :]
    store_rows(Y, REST, at, acc / divisor[:, None], inside, S.NARROW)
    tl.store(DIVISOR + rows + m, divisor, mask=m < T)


# -------------------------------------------------------------------------------------------------- gradients


@triton.jit
def _add_keys_to_gradient(dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, K, V, k_t, v_t, LOG, log_at, start, d, e, T,
                          S: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add one tile of keys of the same chunk to the gradients of a tile of queries."""
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    n = start + tl.arange(0, S.BN)
    k, v = load_rows(K, k_t, n, d, T, S.D).to(OPERAND), load_rows(V, v_t, n, e, T, S.E).to(OPERAND)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad = tl.dot(dn, tl.trans(v), input_precision=PRECISION)
    if S.BY_SUM:
        grad += dz[:, None]
    if S.DECAY:
        grad *= left_of(log[:, None], log_decay(LOG, log_at, n, T, S.DECAY)[None, :])
    if MASKED:
        grad = tl.where((n[None, :] <= m[:, None]) & (n < T)[None, :], grad, 0.0)
    if S.ROWS:
        da0 += tl.sum(grad, 1)
        da1 += tl.sum(grad * s, 1)
        if S.ORDER > 1:
            da2 += tl.sum(grad * s * s, 1)
        if S.ORDER > 2:
            da3 += tl.sum(grad * s * s * s, 1)
    if S.DECAY:
        w = weights(s, a0[:, None], a1[:, None], a2[:, None], a3[:, None], S.ORDER)
        of_weights += tl.sum(grad * w, 1).to(of_weights.dtype)
    ds = grad * slopes(s, a1[:, None], a2[:, None], a3[:, None], S.ORDER)
    return tl.dot(ds.to(OPERAND), k, dq, input_precision=PRECISION), da0, da1, da2, da3, of_weights


@launched
@triton.jit
def backward_queries(
    Q, K, V, DN, DZ, ALPHA, LOG, SMALL, S2, S3, LOWER, DQ, DALPHA, DROW,
    q_strides, k_strides, v_strides, n_strides, dq_strides,
    T, H, chunks, all_rows, S: tl.constexpr,
):  # fmt: skip
    """dq, dα if rows have their own, and Σ_s g w (the derivative of the loss by a common factor of a row's weights)."""
    BD: tl.constexpr = S.BD
    BM: tl.constexpr = S.BM
    P: tl.constexpr = S.P
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dq_b, dq_t, dq_h = dq_strides
    tl.static_assert(not (S.BY_SUM and S.ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * S.BM
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    g = h // S.GROUP
    chunk = first // S.CHUNK if S.CAUSAL else 0
    m = first + tl.arange(0, S.BM)
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    q_at, rows = Q + b * q_b + h * q_h, (b * H + h) * T
    heads = H // S.GROUP
    past = (b * heads + g) * chunks + chunk
    q = load_rows(q_at, q_t, m, d, T, S.D).to(OPERAND)
    dn = load_rows(DN + b * n_b + h * n_h, n_t, m, e, T, S.E).to(OPERAND)
    dz = tl.load(DZ + rows + m, mask=m < T, other=0.0) if S.BY_SUM else tl.zeros((BM,), tl.float32)
    a0, a1, a2, a3 = coefficients(ALPHA, rows, all_rows, m, T, S)
    log_at = (b * heads + g) * T
    log = log_decay(LOG, log_at, m, T, S.DECAY)
    dq = tl.zeros((BM, BD), tl.float32)
    da0 = tl.zeros((BM,), tl.float32)
    da1, da2, da3 = da0, da0, da0
    there = 1 if S.STARTED else (chunk > 0).to(tl.int32)  # no branch: it would serialize wgmma
    small = SMALL + past * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
    at = small + S.D * S.E + S.E
    if S.ORDER > 2:
        third = tl.zeros((BM, BD), tl.float32)
        at3 = S3 + past * S.ROWS3 * S.E
        c = tl.arange(0, S.P * S.BD)
        for group in range((S.D + S.P - 1) // S.P * there):
            total = tl.zeros((BM, P * BD), tl.float32)
            members, held = members_of(group, S.D, S.P)
            for a in range(members):
                factor = entry(q_at, q_t, a, m, T) * tl.where(a < group * S.P, 2.0, 1.0)
                block = tl.trans(block_of(at3, a, c, e, S.D, S.E, S.BD, S.P))
                total = add_block(total, dn, factor, block, PRECISION)
            third += contracted(total, group_of(q_at, q_t, m, group, T, S.D, S.P), S.BD, S.P)
            at3 += held * S.P * S.D * S.E
        da3 = tl.sum(third * q.to(tl.float32), 1)
        dq += 3 * a3[:, None] * third
    if S.ORDER > 1:
        at2 = S2 + past * S.ROWS2 * S.E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * H + h, m, T)
        second = pairs_times(dn, q_at + m * q_t, m < T, at2, there, LOWER, T, e, S.D, S.E, S.BD, PRECISION)
        if S.BY_SUM:
            second += dz[:, None] * times_square(q, at, d, S.D, OPERAND, PRECISION)
        da2 = tl.sum(second * q.to(tl.float32), 1)
        dq += 2 * a2[:, None] * second
    one = tl.dot(
        dn, tl.trans(block_of(small, 0, d, e, S.D, S.E, S.BD, 1)).to(OPERAND), input_precision=PRECISION
    )
    if S.BY_SUM:
        one += dz[:, None] * tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)[None, :]
    da1 = tl.sum(one * q.to(tl.float32), 1)
    dq += a1[:, None] * one
    if S.ROWS or S.DECAY:
        zero = tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)
        da0 = tl.sum(dn.to(tl.float32) * zero[None, :], 1)
        if S.BY_SUM:
            da0 += dz * tl.load(at + S.D * S.D + S.D)
    if S.DECAY:
        past_left = tl.exp(log.to(tl.float32))
        dq *= past_left[:, None]
        da0, da1, da2, da3 = da0 * past_left, da1 * past_left, da2 * past_left, da3 * past_left
    of_weights = (a0 * da0 + a1 * da1 + a2 * da2 + a3 * da3).to(log.dtype)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    if S.CAUSAL:
        whole = first // S.BN * S.BN  # keys before this need no mask
        for start in range(chunk * S.CHUNK, whole, S.BN):
            dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
                dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                S, False,
            )  # fmt: skip
        for start in range(whole, tl.minimum(first + S.BM, T), S.BN):
            dq, da0, da1, da2, da3, of_weights = _add_keys_to_gradient(
                dq, da0, da1, da2, da3, of_weights, q, dn, dz, m, log, a0, a1, a2, a3, k_at, v_at, k_t, v_t, LOG, log_at, start, d, e, T,
                S, True,
            )  # fmt: skip
    inside = (m < T)[:, None] & (d < S.D)[None, :]
    at = DQ + b * dq_b + h * dq_h + m[:, None] * dq_t + d[None, :]
    tl.store(at, dq.to(DQ.dtype.element_ty), mask=inside)
    if S.ROWS:
        tl.store(DALPHA + rows + m, da0, mask=m < T)
        tl.store(DALPHA + all_rows + rows + m, da1, mask=m < T)
        if S.ORDER > 1:
            tl.store(DALPHA + 2 * all_rows + rows + m, da2, mask=m < T)
        if S.ORDER > 2:
            tl.store(DALPHA + 3 * all_rows + rows + m, da3, mask=m < T)
    if S.DECAY:
        tl.store(DROW + rows + m, of_weights, mask=m < T)


@triton.jit
def _add_queries(dk, dv, of_weights, k, v, n, log_s, Q, DN, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                 d, e, T, S: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Add one tile of queries of the same chunk to the gradients of a tile of keys; tiles are [keys, queries].

    Queries beyond the text have zeros for q, dn and dz and add nothing; gradients of keys beyond it are not stored.
    """
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    m = start + tl.arange(0, S.BM)
    q, dn = load_rows(Q, q_t, m, d, T, S.D).to(OPERAND), load_rows(DN, n_t, m, e, T, S.E).to(OPERAND)
    a0, a1, a2, a3 = coefficients(ALPHA, rows, all_rows, m, T, S)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    w = weights(s, a0[None, :], a1[None, :], a2[None, :], a3[None, :], S.ORDER)
    slope = slopes(s, a1[None, :], a2[None, :], a3[None, :], S.ORDER)
    if S.DECAY:
        left = left_of(log_decay(LOG, of_key, m, T, S.DECAY)[None, :], log_s[:, None])
        w, slope = w * left, slope * left
    seen = n[:, None] <= m[None, :]
    if MASKED:
        w = tl.where(seen, w, 0.0)
    dv = tl.dot(w.to(OPERAND), dn, dv, input_precision=PRECISION)
    grad = tl.dot(v, tl.trans(dn), input_precision=PRECISION)
    if S.BY_SUM:
        grad += tl.load(DZ + rows + m, mask=m < T, other=0.0)[None, :]
    if S.DECAY:
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
    T, H, chunks, all_rows, S: tl.constexpr,
):  # fmt: skip
    """dk, dv, and Σ_t g w (the derivative of the loss by a common factor of a key's weights), for one key-value head.

    The moments are those of (q, dn, dz) over later chunks. If rows have their own coefficients, the moments already
    contain them. LEFT is the log decay from a key to the end of its chunk.
    """
    BD: tl.constexpr = S.BD
    BE: tl.constexpr = S.BE
    BN: tl.constexpr = S.BN
    C: tl.constexpr = S.C
    P: tl.constexpr = S.P
    OPERAND: tl.constexpr = S.OPERAND
    PRECISION: tl.constexpr = S.PRECISION
    q_b, q_t, q_h = q_strides
    k_b, k_t, k_h = k_strides
    v_b, v_t, v_h = v_strides
    n_b, n_t, n_h = n_strides
    dk_b, dk_t, dk_h = dk_strides
    dv_b, dv_t, dv_h = dv_strides
    tl.static_assert(not (S.BY_SUM and S.ORDER > 2), "row sums of order 3 would need cubic sums of keys")
    first = tl.program_id(0) * S.BN
    heads = H // S.GROUP
    b, g = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    chunk = first // S.CHUNK if S.CAUSAL else 0
    n = first + tl.arange(0, S.BN)
    d, e = tl.arange(0, S.BD), tl.arange(0, S.BE)
    k_at, v_at = K + b * k_b + g * k_h, V + b * v_b + g * v_h
    k, v = load_rows(k_at, k_t, n, d, T, S.D).to(OPERAND), load_rows(v_at, v_t, n, e, T, S.E).to(OPERAND)
    of_key = (b * heads + g) * T
    log_s = log_decay(LOG, of_key, n, T, S.DECAY)
    later = (b * heads + g) * chunks + chunk
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BE), tl.float32)
    of_weights = tl.zeros((BN,), log_s.dtype)
    there = 1 if S.STARTED else (chunk < chunks - 1).to(tl.int32)  # no branch: it would serialize wgmma
    c0 = 1.0 if S.ROWS else C[0]
    c1 = 1.0 if S.ROWS else C[1]
    small = SMALL + later * (S.D * S.E + S.E + S.D * S.D + S.D + 1)
    at = small + S.D * S.E + S.E
    if S.ORDER > 2:
        c3 = 1.0 if S.ROWS else C[3]
        at3 = S3 + later * S.ROWS3 * S.E
        c = tl.arange(0, S.P * S.BD)
        for group in range((S.D + S.P - 1) // S.P * there):
            k2 = products(k_at, k_t, n, group, T, S.D, S.BD, S.P, OPERAND)
            total = tl.zeros((BN, P * BD), tl.float32)
            members, held = members_of(group, S.D, S.P)
            for a in range(members):
                factor = entry(k_at, k_t, a, n, T) * tl.where(a < group * S.P, 2.0, 1.0)
                block = block_of(at3, a, c, e, S.D, S.E, S.BD, S.P)
                dv = add_block(dv, k2, factor, block, PRECISION)
                total = add_block(total, v, factor, tl.trans(block), PRECISION)
            dk += contracted(total, group_of(k_at, k_t, n, group, T, S.D, S.P), S.BD, S.P)
            at3 += held * S.P * S.D * S.E
        dv *= c3
        dk *= 3 * c3
    if S.ORDER > 1:
        c2 = 1.0 if S.ROWS else C[2]
        at2 = S2 + later * S.ROWS2 * S.E
        if LOWER is not None:
            LOWER = sums_at(LOWER, b * heads + g, n, T)
        of_v, of_k = read_both(k, v, k_at + n * k_t, n < T, at2, there, LOWER, T, e, S.D, S.E, PRECISION)
        if S.BY_SUM:
            row = times_square(k, at, d, S.D, OPERAND, PRECISION)
            of_k += row
            of_weights += c2 * tl.sum(row * k.to(tl.float32), 1)
        dv += c2 * of_v
        dk += 2 * c2 * of_k
    block = block_of(small, 0, d, e, S.D, S.E, S.BD, 1).to(OPERAND)
    dv += c1 * tl.dot(k, block, input_precision=PRECISION)
    dv += c0 * tl.load(small + S.D * S.E + e, mask=e < S.E, other=0.0)[None, :]
    dk += c1 * tl.dot(v, tl.trans(block), input_precision=PRECISION)
    if S.BY_SUM:
        z_first = tl.load(at + S.D * S.D + d, mask=d < S.D, other=0.0)
        dk += c1 * z_first[None, :]
        of_weights += c1 * tl.sum(k.to(tl.float32) * z_first[None, :], 1) + c0 * tl.load(at + S.D * S.D + S.D)
    if S.DECAY:
        at_end = tl.exp(log_decay(LEFT, of_key, n, T, S.DECAY).to(tl.float32))
        dk, dv = dk * at_end[:, None], dv * at_end[:, None]
        of_weights = of_weights * at_end + tl.sum(dv * v.to(tl.float32), 1)
    if S.CAUSAL:
        whole = tl.cdiv(first + S.BN, S.BM) * S.BM  # from here on, queries see the whole tile
        end = tl.minimum((chunk + 1) * S.CHUNK, T)
        for member in range(S.GROUP):
            h = g * S.GROUP + member
            q_at, dn_at, rows = Q + b * q_b + h * q_h, DN + b * n_b + h * n_h, (b * H + h) * T
            for start in range(first // S.BM * S.BM, tl.minimum(whole, end), S.BM):
                dk, dv, of_weights = _add_queries(
                    dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                    d, e, T, S, True,
                )  # fmt: skip
            for start in range(whole, end, S.BM):
                dk, dv, of_weights = _add_queries(
                    dk, dv, of_weights, k, v, n, log_s, q_at, dn_at, DZ, ALPHA, LOG, of_key, rows, all_rows, q_t, n_t, start,
                    d, e, T, S, False,
                )  # fmt: skip
    inside_d, inside_e = (n < T)[:, None] & (d < S.D)[None, :], (n < T)[:, None] & (e < S.E)[None, :]
    at = DK + b * dk_b + g * dk_h + n[:, None] * dk_t + d[None, :]
    tl.store(at, dk.to(DK.dtype.element_ty), mask=inside_d)
    at = DV + b * dv_b + g * dv_h + n[:, None] * dv_t + e[None, :]
    tl.store(at, dv.to(DV.dtype.element_ty), mask=inside_e)
    if S.DECAY:
        tl.store(DKEY + of_key + n, of_weights, mask=n < T)
