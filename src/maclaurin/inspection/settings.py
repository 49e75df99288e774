"""What to look at, and what the user may not ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError
from maclaurin.spec.polynomials import HIGHEST_ORDER

ORDERS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
WINDOWS = (32, 64, 128)
#: tails beside a window are tried up to this order: higher ones have no state that fits anywhere
HIGHEST_TAIL = 4
LONGEST_CONTEXT = 1024


@final
@dataclass(frozen=True)
class Settings:
    """All choices that decide a number."""

    tokens: int = 512
    context: int | None = None
    orders: tuple[int, ...] = ORDERS
    windows: tuple[int, ...] = WINDOWS
    sinks: int = 1
    tolerance: float = 0.01
    weights: str = "float32"
    chunk: int = 128
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.weights not in ("float32", "bfloat16", "float16"):
            raise InputError(f"weights are float32, bfloat16 or float16, not {self.weights!r}.")
        if not 0 < self.tolerance < 1:
            raise InputError(f"tolerance must lie between 0 and 1, got {self.tolerance}.")
        if self.context is not None and self.context < 2:
            raise InputError(f"a context of {self.context} predicts nothing: at least 2 tokens are needed.")

    @property
    def tail_orders(self) -> tuple[int, ...]:
        """Orders of the tails beside a window."""
        return tuple(order for order in self.orders if 0 < order <= HIGHEST_TAIL)


def read_orders(written: str) -> tuple[int, ...]:
    """'1,2,4' as orders, ascending."""
    found = _whole_numbers(written, "orders", "1,2,4,8")
    if not found:
        raise InputError("orders: none given; write some as in --orders 1,2,4,8.")
    if found[-1] > HIGHEST_ORDER:
        raise InputError(
            f"orders: {found[-1]} is beyond {HIGHEST_ORDER}, the last one whose factorial is a number."
        )
    return found


def read_windows(written: str) -> tuple[int, ...]:
    """'32,64' as windows, ascending; 'none' for none."""
    if written.strip() == "none":
        return ()
    found = _whole_numbers(written, "windows", "32,64,128, or none")
    if found and found[0] < 1:
        raise InputError("windows: a window holds at least 1 token.")
    return found


def _whole_numbers(written: str, what: str, example: str) -> tuple[int, ...]:
    numbers = []
    for word in written.split(","):
        if not word.strip().isdecimal():
            raise InputError(
                f"{what}: {word.strip()!r} in {written!r} is no whole number; write --{what} {example}."
            )
        numbers.append(int(word))
    return tuple(sorted(set(numbers)))
