"""Finite groups as multiplication tables: Zn, Sn and An."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache

import numpy as np

from maclaurin.data.errors import DataError

LARGEST = 1000


@cache
def multiplication_table(name: str) -> np.ndarray:
    """table[a, b] = b∘a (first a, then b), element 0 being the one that changes nothing."""
    match = re.fullmatch(r"([ZSA])(\d+)", name)
    order = _order(match[1], int(match[2])) if match else 0
    if match is None or not 2 <= order <= LARGEST:
        raise DataError(
            f"there is no group {name!r} here with 2 to {LARGEST} elements; use Zn (addition modulo n; "
            "Z2 is parity), Sn (all permutations, up to S6) or An (the even ones, up to A6)."
        )
    kind, degree = match[1], int(match[2])
    return _cyclic(degree) if kind == "Z" else _permutations(degree, even_only=kind == "A")


def _order(kind: str, degree: int) -> int:
    if kind == "Z" or degree > 7:
        return degree if kind == "Z" else LARGEST + 1
    return math.factorial(degree) // (2 if kind == "A" else 1)


def _cyclic(degree: int) -> np.ndarray:
    numbers = np.arange(degree)
    return (numbers[:, None] + numbers) % degree


def _permutations(degree: int, even_only: bool) -> np.ndarray:
    elements = [p for p in itertools.permutations(range(degree)) if not even_only or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    return np.array([[number[tuple(b[i] for i in a)] for b in elements] for a in elements])


def _is_even(permutation: tuple[int, ...]) -> bool:
    inversions = sum(a > b for a, b in itertools.combinations(permutation, 2))
    return inversions % 2 == 0
