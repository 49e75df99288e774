"""How many multisets there are: the distinct entries of a Kronecker power."""

from __future__ import annotations


def number_of_multisets(d: int, n: int) -> int:
    """C(d+n−1, n), multisets of size n over d indices.

    Plain products, so that torch.compile can follow it with a symbolic d.
    """
    number = 1
    for i in range(n):
        number = number * (d + i) // (i + 1)
    return number
