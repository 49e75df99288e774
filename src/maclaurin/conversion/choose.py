"""Which layer gets which attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError
from maclaurin.spec.head_groups import specs_in


@final
@dataclass(frozen=True)
class Choice:
    """The attention of every layer, and why."""

    attention: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def changed(self) -> tuple[int, ...]:
        """Layers that do not keep their own attention."""
        return tuple(n for n, why in enumerate(self.reasons) if why != "kept")


def choose(
    own: Sequence[str],
    attention: str,
    *,
    layers: Iterable[int] | None = None,
    sharp: Iterable[int] = (),
    sharp_attention: str | None = None,
) -> Choice:
    """`attention` in `layers` (all by default), but sharp layers keep their own or get `sharp_attention`."""
    for text in (attention, *([] if sharp_attention is None else [sharp_attention])):
        specs_in(text)
    chosen = set(range(len(own)) if layers is None else layers)
    unknown = sorted(chosen - set(range(len(own))))
    if unknown:
        raise InputError(f"the model has layers 0 to {len(own) - 1}, not {', '.join(map(str, unknown))}.")
    hard = set(sharp)
    result, reasons = [], []
    for n, before in enumerate(own):
        if n not in chosen:
            result.append(before)
            reasons.append("kept")
        elif n in hard:
            result.append(sharp_attention or before)
            reasons.append("sharp" if sharp_attention else "kept")
        else:
            result.append(attention)
            reasons.append("swapped")
    if all(reason == "kept" for reason in reasons):
        raise InputError(
            "no layer is left to convert: name other layers, or a --sharp-attention for sharp ones."
        )
    return Choice(tuple(result), tuple(reasons))


def read_layers(text: str, count: int) -> list[int]:
    """'0-4,7,-1' → layers; negative ones count from the end."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(\d+))?\s*", piece)
        if match is None:
            raise InputError(
                f"--layers takes numbers and ranges between commas, as in 0-4,7 or -1; got {piece.strip()!r}."
            )
        start = int(match[1])
        stop = start if match[2] is None else int(match[2])
        found += [n + count if n < 0 else n for n in range(start, stop + 1)]
    return sorted(set(found))
