"""The float64 oracle: every catalogue row written straight from its formula, with plain loops.

    w_ts = D_ts κ_ts,    D_ts = exp(Σ_{s<r≤t} log f_r)
    y_t  = p_t N( o_t Σ_{s≤t} w_ts i_s v_s / G_t )

G may be the row sum Σ_{s≤t} w_ts: it holds the forget gate and not the input gate, which multiplies
the value only. Nothing here imports the code under test; inputs are taken after the rotary
embedding, convolution, extra tokens and learned affine maps of a layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Case:
    """One sequence, float64. Query head h reads key/value head h // (H // Hkv)."""

    q: Array  # [T, H, d]
    k: Array  # [T, Hkv, d]
    v: Array  # [T, Hkv, e]
    input_gate: Array | None = None  # [T, Hkv]
    log_forget: Array | None = None  # [T, Hkv], log of the forget gate
    output_gate: Array | None = None  # [T, H]
    denominator_gate: Array | None = None  # [T, H]


# --- κ: one query [d] and its visible keys [t, d] -> one weight per key --------------------------

Kernel: TypeAlias = Callable[[Array, Array], list[float]]


def dot(q: Array, k: Array) -> float:
    """q·k"""
    return sum(float(a) * float(b) for a, b in zip(q, k, strict=True))


def score(q: Array, k: Array) -> float:
    """x = q·k/√d"""
    return dot(q, k) / math.sqrt(len(q))


def each(kappa: Callable[[Array, Array], float]) -> Kernel:
    """κ depends on the query and one key only."""
    return lambda q, keys: [kappa(q, k) for k in keys]


def relu(u: Array) -> Array:
    """max(u, 0)"""
    return np.array([max(float(a), 0.0) for a in u])


def elu1(u: Array) -> Array:
    """elu(u) + 1:  u + 1 for u > 0, else exp(u)"""
    return np.array([a + 1.0 if a > 0 else math.exp(a) for a in u])


def unit(u: Array) -> Array:
    """u/‖u‖, and 0 for u = 0"""
    length = math.sqrt(dot(u, u))
    return u / length if length > 0 else u


def taylor_sum(order: int, x: float) -> float:
    """T_N(x) = Σ_{n≤N} xⁿ/n!"""
    return sum(x**n / math.factorial(n) for n in range(order + 1))


EXP = each(lambda q, k: math.exp(score(q, k)))
EXP_C5 = each(lambda q, k: math.exp(min(score(q, k), 5.0)))
SIGMOID = each(lambda q, k: 1.0 / (1.0 + math.exp(-(score(q, k) - 6.93))))
IDENTITY = each(score)
SQUARE = each(lambda q, k: score(q, k) ** 2)
RELU = each(lambda q, k: dot(relu(q), relu(k)))
RELU_SCALED = each(lambda q, k: score(relu(q), relu(k)))
RELU_SCALED_C5 = each(lambda q, k: min(score(relu(q), relu(k)), 5.0))
ELU1 = each(lambda q, k: dot(elu1(q), elu1(k)))
COSINE = each(lambda q, k: dot(unit(q), unit(k)))


def taylor(order: int) -> Kernel:
    """κ = T_N(x)"""
    return each(lambda q, k: taylor_sum(order, score(q, k)))


# --- κ that depends on the whole row: scores of the tail -> (weights, shift) ------------------------
# A key outside the tail has the exact weight exp(x - shift). An empty tail has shift 0.

Tail: TypeAlias = Callable[[list[float]], tuple[list[float], float]]


def mean(xs: list[float]) -> float:
    """(1/n) Σ_j x_j"""
    return sum(xs) / len(xs)


def taylor_tail(order: int) -> Tail:
    """weights T_N(x_j), shift 0"""
    return lambda xs: ([taylor_sum(order, x) for x in xs], 0.0)


def taylor_about_mean(order: int) -> Tail:
    """weights T_N(x_j - c), shift c,  c = mean_j x_j"""

    def tail(xs: list[float]) -> tuple[list[float], float]:
        c = mean(xs) if xs else 0.0
        return [taylor_sum(order, x - c) for x in xs], c

    return tail


def poly(*coefficients: float) -> Tail:
    """weights Σ_n a_n x_jⁿ, shift 0"""
    return lambda xs: ([sum(a * x**n for n, a in enumerate(coefficients)) for x in xs], 0.0)


def hermite_polynomial(n: int, c: float, u: float) -> float:
    """h_0 = 1,  h_1 = c,  h_{n+1} = c h_n - n u h_{n-1}"""
    if n == 0:
        return 1.0
    if n == 1:
        return c
    return c * hermite_polynomial(n - 1, c, u) - (n - 1) * u * hermite_polynomial(n - 2, c, u)


def hermite(order: int) -> Tail:
    """weights p_j = 1 + Σ_{1≤n≤N} (h_n(c_j) - mean_i h_n(c_i))/n!, shift m + u/2

    m = mean_j x_j,  c_j = x_j - m,  u = mean_j c_j²
    """

    def tail(xs: list[float]) -> tuple[list[float], float]:
        if not xs:
            return [], 0.0
        m = mean(xs)
        c = [x - m for x in xs]
        u = mean([cj**2 for cj in c])
        p = [1.0 for _ in xs]
        for n in range(1, order + 1):
            h = [hermite_polynomial(n, cj, u) for cj in c]
            for j in range(len(xs)):
                p[j] += (h[j] - mean(h)) / math.factorial(n)
        return p, m + u / 2

    return tail


def everywhere(tail: Tail) -> Kernel:
    """Every visible key is in the tail."""
    return lambda q, keys: tail([score(q, k) for k in keys])[0]


def window(tail: Tail, width: int, sinks: int = 0) -> Kernel:
    """Key j is exact if j < sinks or j > t - width (t the query's own index), else in the tail."""

    def kernel(q: Array, keys: Array) -> list[float]:
        t = len(keys) - 1
        far = [j for j in range(t + 1) if not (j < sinks or j > t - width)]
        far_weights, shift = tail([score(q, keys[j]) for j in far])
        tail_weight = dict(zip(far, far_weights, strict=True))
        return [
            tail_weight[j] if j in tail_weight else math.exp(score(q, keys[j]) - shift) for j in range(t + 1)
        ]

    return kernel


# --- G: weights w_ts of the visible keys, denominator gate g_r for r ≤ t -> a number --------------

Denominator: TypeAlias = Callable[[list[float], list[float]], float]


def one(w: list[float], g: list[float]) -> float:
    """1"""
    return 1.0


def row_sum(w: list[float], g: list[float]) -> float:
    """Σ_s w_ts"""
    return sum(w)


def row_sum_floored(w: list[float], g: list[float]) -> float:
    """max(Σ_s w_ts, 1)"""
    return max(sum(w), 1.0)


def row_sum_plus(eps: float) -> Denominator:
    """Σ_s w_ts + eps"""
    return lambda w, g: sum(w) + eps


def length(w: list[float], g: list[float]) -> float:
    """t, the number of visible keys"""
    return float(len(w))


def running_floored(w: list[float], g: list[float]) -> float:
    """max(1, Σ_{r≤t} exp(g_r))"""
    return max(1.0, sum(math.exp(a) for a in g))


def length_times_running(w: list[float], g: list[float]) -> float:
    """t · Σ_{r≤t} exp(g_r)"""
    return len(w) * sum(math.exp(a) for a in g)


# --- N: the output of one token, [H, e] -> [H, e]; a zero vector stays zero -----------------------

Norm: TypeAlias = Callable[[Array], Array]


def divide(y: Array, size: float) -> Array:
    """y/size, and y for size = 0"""
    return y / size if size > 0 else y


def per_head(norm: Callable[[Array], Array]) -> Norm:
    """The norm of each head's vector [e] on its own."""
    return lambda y: np.stack([norm(head) for head in y])


def no_norm(y: Array) -> Array:
    """y"""
    return y


def rms(y: Array) -> Array:
    """y/√mean(y²)"""
    return divide(y, math.sqrt(np.mean(y**2)))


def standardise(y: Array) -> Array:
    """(y - mean)/√variance"""
    centred = y - np.mean(y)
    return divide(centred, math.sqrt(np.mean(centred**2)))


L2 = per_head(unit)
D_L2 = per_head(lambda y: len(y) * unit(y))  # e y/‖y‖, e the value size
RMS = per_head(rms)
RMS_ALL_HEADS = rms  # mean over H·e
LAYER = per_head(standardise)


# --- one row of the catalogue --------------------------------------------------------------------

IN, FORGET, DENOMINATOR = "input_gate", "log_forget", "denominator_gate"  # fields of Case
OUT, OUT_AFTER_NORM = "output_gate", "output_gate after the norm"  # one field, two places


@dataclass(frozen=True, slots=True)
class Row:
    """y_t = p_t N( o_t Σ_{s≤t} D_ts κ_ts i_s v_s / G_t ), with the gates the row names, else 1."""

    kernel: Kernel
    denominator: Denominator = one
    gates: tuple[str, ...] = ()
    norm: Norm = no_norm

    def gate(self, case: Case, name: str, otherwise: Array) -> Array:
        """The case's gate if this row has it, else a neutral one."""
        if name not in self.gates:
            return otherwise
        values: Array | None = getattr(case, name.split()[0])
        if values is None:
            raise ValueError(f"this row needs the gate {name}, but the case has None")
        return values

    def weights(self, case: Case, log_f: Array, t: int, h: int) -> list[float]:
        """κ_ts of query t of head h for s ≤ t"""
        return self.kernel(case.q[t, h], case.k[: t + 1, h // (case.q.shape[1] // case.k.shape[1])])

    def __call__(self, case: Case) -> Array:
        """y [T, H, e]"""
        T, H, _ = case.q.shape
        _, Hkv, e = case.v.shape
        i = self.gate(case, IN, np.ones((T, Hkv)))
        log_f = self.gate(case, FORGET, np.zeros((T, Hkv)))
        o = self.gate(case, OUT, np.ones((T, H)))
        p = self.gate(case, OUT_AFTER_NORM, np.ones((T, H)))
        g = self.gate(case, DENOMINATOR, np.zeros((T, H)))

        y = np.zeros((T, H, e))
        for t in range(T):
            for h in range(H):
                kv = h // (H // Hkv)
                w = self.weights(case, log_f, t, h)
                for s in range(t + 1):
                    w[s] *= math.exp(sum(log_f[r, kv] for r in range(s + 1, t + 1)))
                for s in range(t + 1):
                    y[t, h] += w[s] * i[s, kv] * case.v[s, kv]
                y[t, h] /= self.denominator(w, [g[r, h] for r in range(t + 1)])
                y[t, h] *= o[t, h]
            y[t] = self.norm(y[t])
            for h in range(H):
                y[t, h] *= p[t, h]
        return y


def near(t: int, width: int, sinks: int) -> list[int]:
    """The last `width` keys and the first `sinks`, for query t"""
    return [s for s in range(t + 1) if s < sinks or s > t - width]


@dataclass(frozen=True, slots=True)
class KeptRow(Row):
    """Exact weights exp(x - shift) for the near keys and the kept ones, the tail's weights for the others.

    a_s = Σ_u (1/G) Σ_h D_us exp(x_us) / Σ_{j near u} D_uj exp(x_uj) over the queries u that s is near to;
    kept at t are the `slots` best by (a_s, s) of the keys that are no longer near.
    """

    tail: Tail = poly(0)
    width: int = 1
    sinks: int = 0
    slots: int = 1

    def received(self, case: Case, log_f: Array, kv: int) -> list[float]:
        """a_s for every key of head kv"""
        T, H, _ = case.q.shape
        group = H // case.k.shape[1]
        a = [0.0] * T
        for u in range(T):
            seen = near(u, self.width, self.sinks)
            for h in range(kv * group, (kv + 1) * group):
                weight = {
                    s: math.exp(
                        score(case.q[u, h], case.k[s, kv]) + sum(log_f[r, kv] for r in range(s + 1, u + 1))
                    )
                    for s in seen
                }
                for s in seen:
                    a[s] += weight[s] / sum(weight.values()) / group
        return a

    def weights(self, case: Case, log_f: Array, t: int, h: int) -> list[float]:
        """κ_ts of query t of head h for s ≤ t"""
        kv = h // (case.q.shape[1] // case.k.shape[1])
        exact = near(t, self.width, self.sinks)
        a = self.received(case, log_f, kv)
        gone = sorted((s for s in range(t + 1) if s not in exact), key=lambda s: (a[s], s), reverse=True)
        exact = exact + gone[: self.slots]
        far = [s for s in range(t + 1) if s not in exact]
        x = [score(case.q[t, h], case.k[s, kv]) for s in range(t + 1)]
        far_weights, shift = self.tail([x[s] for s in far])
        in_tail = dict(zip(far, far_weights, strict=True))
        return [in_tail[s] if s in in_tail else math.exp(x[s] - shift) for s in range(t + 1)]


# Columns as in the catalogue: κ, denominator, gates, norm. In the formulas x = q·k/√d,
# E = exp(min(x, 5)), Σ = Σ_{s≤t}, i o p = input gate, output gate, output gate after the norm.
PAPER: dict[str, Row] = {
    # Σ exp(x) v / Σ exp(x)
    "softmax": Row(EXP, row_sum),
    # Σ E v / max(Σ E, 1); detaching changes no value
    "softmax_clamp_denom": Row(EXP_C5, row_sum_floored),
    "softmax_detach_denom": Row(EXP_C5, row_sum_floored),
    # o Σ E v / (Σ E + 1e-4)
    "softmax_detach_denom_gate": Row(EXP_C5, row_sum_plus(1e-4), (OUT,)),
    # Σ E v / t
    "softmax_divs": Row(EXP_C5, length),
    # o Σ E v
    "softmax_gate": Row(EXP_C5, one, (OUT,)),
    # o Σ E v / t
    "softmax_divS_gate": Row(EXP_C5, length, (OUT,)),
    "softmax_divS_gatev2": Row(EXP_C5, length, (OUT,)),
    # RMS(Σ E v / t)
    "softmax_divS_norm": Row(EXP_C5, length, (), RMS),
    # Σ T_80(x) v / Σ T_80(x)
    "softmax_taylor_80terms": Row(taylor(80), row_sum),
    # Layer(o Σ E i v / t), then without each of its parts
    "gated_softmax": Row(EXP_C5, length, (IN, OUT), LAYER),
    "gated_softmax_no_norm": Row(EXP_C5, length, (IN, OUT)),
    "gated_softmax_no_in_gate": Row(EXP_C5, length, (OUT,), LAYER),
    "gated_softmax_no_out_gate": Row(EXP_C5, length, (IN,), LAYER),
    "gated_softmax_no_out_gate_no_norm": Row(EXP_C5, length, (IN,)),
    "gated_softmax_no_in_gate_no_norm": Row(EXP_C5, length, (OUT,)),
    # o Σ min(relu(q)·relu(k)/√d, 5) v / t
    "gated_relu_no_in_gate_no_norm": Row(RELU_SCALED_C5, length, (OUT,)),
    # N(Σ E v / t)
    "gated_softmax_no_gate": Row(EXP_C5, length, (), LAYER),
    "gated_softmax_no_gate_rmsnorm": Row(EXP_C5, length, (), RMS),
    # N(Σ E v)
    "gated_softmax_no_gate_rmsnorm_nodivS": Row(EXP_C5, one, (), RMS),
    "gated_softmax_no_gate_L2norm_nodivS": Row(EXP_C5, one, (), L2),
    # L2(Σ exp(x) v)
    "gated_softmax_no_gate_L2norm_nodivS_noclamp": Row(EXP, one, (), L2),
    # L2(Σ relu(q)·relu(k)/√d v)
    "gated_ReLU_no_gate_L2norm_nodivS_noclamp": Row(RELU_SCALED, one, (), L2),
    # L2(o Σ exp(x) v / t)
    "gated_softmax_out_gate_L2norm_nodivS_noclamp": Row(EXP, length, (OUT,), L2),
    # p L2(Σ exp(x) v / t)
    "gated_softmax_post_out_gate_L2norm_nodivS_noclamp": Row(EXP, length, (OUT_AFTER_NORM,), L2),
    # Σ E v / t
    "gated_softmax_no_gate_no_norm": Row(EXP_C5, length),
    # e L2(Σ E v / t)
    "gated_softmax_no_gate_customnorm": Row(EXP_C5, length, (), D_L2),
    # Σ E v / max(1, Σ_{r≤t} exp(g_r))
    "gated_softmax_cumgate": Row(EXP_C5, running_floored, (DENOMINATOR,)),
    # Σ E v / (t Σ_{r≤t} exp(g_r))
    "cumulative_gated_softmax": Row(EXP_C5, length_times_running, (DENOMINATOR,)),
    # Layer(o Σ E i v / t); convolution and extra tokens are the layer's
    "gated_softmax_plusplus": Row(EXP_C5, length, (IN, OUT), LAYER),
    "gated_softmax_plusplus_extratoks": Row(EXP_C5, length, (IN, OUT), LAYER),
    # Layer(o Σ D E i v / t)
    "gated_softmax_decay": Row(EXP_C5, length, (IN, FORGET, OUT), LAYER),
    # Σ (elu+1)(q)·(elu+1)(k) v / Σ (elu+1)(q)·(elu+1)(k)
    "linear_elu": Row(ELU1, row_sum),
    # Σ relu(q)·relu(k) v / (Σ relu(q)·relu(k) + 1e-8)
    "linear_relu": Row(RELU, row_sum_plus(1e-8)),
    # Σ cos(q, k) i v
    "linear_cosine": Row(COSINE, one, (IN,)),
    # RMS over all heads(Σ D x i v)
    "linear_mamba": Row(IDENTITY, one, (IN, FORGET), RMS_ALL_HEADS),
    # Σ D exp(x) v / Σ D exp(x)
    "gated_softmax_plusplus_mamba": Row(EXP, row_sum, (FORGET,)),
    "gated_softmax_plusplus_mamba2": Row(EXP, row_sum, (FORGET,)),
}

FIELD_ROWS: dict[str, Row] = {
    # Σ T_N(x) v / Σ T_N(x) for even N
    "taylor-0": Row(taylor(0), row_sum),
    "taylor-2": Row(taylor(2), row_sum),
    "taylor-4": Row(taylor(4), row_sum),
    "taylor-6": Row(taylor(6), row_sum),
    "taylor-8": Row(taylor(8), row_sum),
    "taylor-10": Row(taylor(10), row_sum),
    # L2(Σ T_N(x) v) for odd N
    "taylor-1": Row(taylor(1), one, (), L2),
    "taylor-3": Row(taylor(3), one, (), L2),
    "taylor-5": Row(taylor(5), one, (), L2),
    "taylor-7": Row(taylor(7), one, (), L2),
    "taylor-9": Row(taylor(9), one, (), L2),
    # Σ T_2(x) v / Σ T_2(x)
    "based": Row(taylor(2), row_sum),
    # Σ x² v / Σ x²; the learned affine is the layer's
    "rebased": Row(SQUARE, row_sum),
    # Σ D x² v / Σ D x²
    "power-retention": Row(SQUARE, row_sum, (FORGET,)),
    "2mamba": Row(SQUARE, row_sum, (FORGET,)),
    # Σ D exp(x) v / Σ D exp(x)
    "2mamba-e": Row(EXP, row_sum, (FORGET,)),
    "forgetting-transformer": Row(EXP, row_sum, (FORGET,)),
    # RMS over all heads(Σ D x i v)
    "mamba-2s": Row(IDENTITY, one, (IN, FORGET), RMS_ALL_HEADS),
    # RMS(Σ D x v)
    "retnet": Row(IDENTITY, one, (FORGET,), RMS),
    # p RMS(Σ D x v)
    "simple-gla": Row(IDENTITY, one, (FORGET, OUT_AFTER_NORM), RMS),
    # Σ (elu+1)(q)·(elu+1)(k) v / Σ (elu+1)(q)·(elu+1)(k)
    "elu-linear-attention": Row(ELU1, row_sum),
    # o Σ cos(q, k) v, the output gate standing for the length power
    "cottention": Row(COSINE, one, (OUT,)),
    # Σ v / (1 + exp(-(x - 6.93)))
    "sigmoid-attention": Row(SIGMOID),
}

NOTATIONS: dict[str, Row] = {
    # Σ T_N(x - c) v / Σ T_N(x - c), c the mean score of the row
    "taylor(1,about=mean)/sum": Row(everywhere(taylor_about_mean(1)), row_sum),
    "taylor(2,about=mean)/sum": Row(everywhere(taylor_about_mean(2)), row_sum),
    "taylor(4,about=mean)/sum": Row(everywhere(taylor_about_mean(4)), row_sum),
    # L2(Σ T_3(x - c) v)
    "taylor(3,about=mean)/l2": Row(everywhere(taylor_about_mean(3)), one, (), L2),
    # Σ (1 + x + x²/2) v / Σ (1 + x + x²/2)
    "poly(1,1,0.5)/sum": Row(everywhere(poly(1, 1, 0.5)), row_sum),
    # Σ p v / t
    "hermite(2)/len": Row(everywhere(hermite(2)), length),
    "hermite(3)/len": Row(everywhere(hermite(3)), length),
    # (Σ_exact exp(x - c) v + Σ_tail T_N(x - c) v) / (the same without v), c = 0 or the tail's mean
    "taylor(2)+window(4,sinks=2)/sum": Row(window(taylor_tail(2), 4, sinks=2), row_sum),
    "taylor(1,about=mean)+window(3)/sum": Row(window(taylor_about_mean(1), 3), row_sum),
    "taylor(2,about=mean)+window(4,sinks=1)/sum": Row(window(taylor_about_mean(2), 4, sinks=1), row_sum),
    # Σ_exact exp(x) v / Σ_exact exp(x)
    "poly(0)+window(4,sinks=1)/sum": Row(window(poly(0), 4, sinks=1), row_sum),
    # (Σ_exact exp(x - m - u/2) v + Σ_tail p v) / (the same without v)
    "hermite(2)+window(4,sinks=1)/sum": Row(window(hermite(2), 4, sinks=1), row_sum),
    # the same with the most attended of the keys that have left the window
    "poly(0)+window(3,sinks=1,kept=2)/sum": KeptRow(EXP, row_sum, width=3, sinks=1, slots=2),
    "poly(0)+window(2,kept=1)/l2": KeptRow(EXP, one, (), L2, width=2, slots=1),
    "taylor(2,about=mean)+window(2,sinks=1,kept=2)/sum": KeptRow(
        EXP, row_sum, tail=taylor_about_mean(2), width=2, sinks=1, slots=2
    ),
    "taylor(2)+window(1,kept=3)/rms": KeptRow(EXP, one, (), RMS, tail=taylor_tail(2), width=1, slots=3),
    "taylor(2)+window(2,sinks=1,kept=2)*in*forget/sum*out": KeptRow(
        EXP, row_sum, (IN, FORGET, OUT), tail=taylor_tail(2), width=2, sinks=1, slots=2
    ),
}

_ROWS = PAPER | FIELD_ROWS | NOTATIONS

ORACLES: dict[str, Callable[[Case], Array]] = dict(_ROWS)

GATES: dict[str, tuple[str, ...]] = {
    name: tuple(gate.split()[0] for gate in row.gates) for name, row in _ROWS.items()
}


def random_case(name: str, T: int, H: int, Hkv: int, d: int, e: int, seed: int) -> Case:
    """A case with standard normal q, k, v and just the gates that the named row needs."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((T, H, d))
    k = rng.standard_normal((T, Hkv, d))
    v = rng.standard_normal((T, Hkv, e))
    gates = {
        "input_gate": rng.uniform(0.1, 0.9, (T, Hkv)),
        "log_forget": rng.uniform(-1.0, -0.01, (T, Hkv)),
        "output_gate": rng.uniform(0.1, 0.9, (T, H)),
        "denominator_gate": rng.standard_normal((T, H)),
    }
    return Case(q, k, v, **{gate: gates[gate] for gate in GATES[name]})
