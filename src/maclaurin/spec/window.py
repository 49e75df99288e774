"""Exact keys beside a polynomial tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from maclaurin.spec.part import Part, register, whole


@register
@final
@dataclass(frozen=True, slots=True)
class Window(Part):
    """The last `size` keys, the current one included, and the first `sinks` weigh e^(x − r) exactly.

    The others, the tail, weigh κ(x), which stands for the same e^(x − r); both share numerator and
    denominator. With about=mean, r is the mean score over the keys in the tail.
    """

    family: ClassVar[str] = "window"
    notation: ClassVar[str] = "window"
    size: int = whole(at_least=1)
    sinks: int = whole(default=0, at_least=0)
