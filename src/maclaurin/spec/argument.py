"""The tensors that parts take beside q, k and v, declared once for the call, the layers and the checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, final

Side = Literal["query", "key"]


class Recipe(enum.Enum):
    """How a layer makes an argument from the token x, one number per head unless it says otherwise."""

    LINEAR = "Wx + b"
    SIGMOID = "σ(Wx + b)"
    LOG_SIGMOID = "ln σ(Wx + b)"
    LOG_SIGMOID_16 = "ln σ(Wx + b)/16"
    MINUS_SOFTPLUS = "−softplus(Wx + b)"
    LINEAR_1024 = "Wx/1024"
    STEP_SIZE = "dt = softplus(Wx + b)"
    MINUS_STEP_SIZE = "−dt·A, dt = softplus(Wx + b), A per head"
    FIXED_DECAY = "ln(1 − 2^(−5−h)), fixed for head h"
    LENGTH_POWER = "t^−σ(p), p per head, initially 0.5"
    SILU = "silu(Wx), one number per channel"


@final
@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor [B, tokens, heads] that `attention` takes by name.

    `tokens` and `heads` say whose: the queries' or the keys'. With `per_channel` it may also be
    [B, tokens, heads, e]. With `running`, a part sees ln Σ_{r≤t} e^{g_r} of it instead of g_t.
    """

    name: str
    symbol: str
    tokens: Side
    heads: Side
    per_channel: bool = False
    running: bool = False
    recipe: Recipe = Recipe.SIGMOID
