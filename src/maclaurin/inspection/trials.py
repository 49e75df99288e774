"""The attentions that an inspection tries in the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError, SpecError
from maclaurin.inspection.inspection_record import About, Kind
from maclaurin.layers.attention import AttentionLayer
from maclaurin.spec import AttentionSpec, Kernel, Part, Poly, SlidingWindow, Taylor, Window
from maclaurin.wording import first_line


@final
@dataclass(frozen=True)
class Trial:
    """One attention for all layers that support it; if none does, `specs` is None and `note` says why."""

    kind: Kind
    attention: str
    specs: tuple[AttentionSpec, ...] | None
    order: int | None = None
    about: About | None = None
    window: int | None = None
    sinks: int | None = None
    note: str = ""

    @property
    def cost(self) -> float:
        """Estimated time, relative to the model's own attention."""
        return 1 + (self.order or 0) * (0.1 if self.about == "mean" else 0.04) + (0.5 if self.window else 0)


def check_layers(name: str, layers: list[AttentionLayer]) -> None:
    """Raise unless the kernel of every layer is exp or a polynomial that approximates it."""
    for number, layer in enumerate(layers):
        kernel = layer.spec.kernel
        if kernel.feature_map is not None or not (kernel.is_exact_exp or kernel.expands_exp):
            raise InputError(
                f"{name}: layer {number} has the attention {layer.spec}. Its kernel is neither exp nor a "
                "series of exp, so there are no orders to measure. Inspect a model with exp or taylor(N)."
            )


def trials(
    specs: list[AttentionSpec],
    *,
    orders: tuple[int, ...],
    tail_orders: tuple[int, ...],
    windows: tuple[int, ...],
    sinks: int,
) -> list[Trial]:
    """The model's own attention; every order about zero and about the mean; every window with each tail."""
    found = [Trial("own", _name(tuple(specs)), tuple(specs))]
    if not any(_can_change(spec) for spec in specs):
        return found
    abouts: tuple[About, ...] = ("zero", "mean")
    found += [_trial("order", specs, order, about) for about in abouts for order in orders]
    found += [
        _trial("window", specs, order, None if order is None else "mean", SlidingWindow(size, sinks=sinks))
        for size in windows
        for order in (None, *tail_orders)
    ]
    return found


def _can_change(spec: AttentionSpec) -> bool:
    """Whether the layer takes another attention; one that has a window keeps it: its memory is constant."""
    return spec.window is None


def _trial(
    kind: Kind,
    specs: list[AttentionSpec],
    order: int | None,
    about: About | None,
    window: Window | None = None,
) -> Trial:
    """taylor(order) in every layer that supports it, alone or with a window; order None: a window alone."""
    kernel: Kernel = Poly((0.0,)) if order is None else Taylor(order, about=about or "zero")
    size, sinks = (None, None) if window is None else (window.size, window.sinks)
    try:
        changed = tuple(
            AttentionSpec.of(kernel, window, *_around(spec)) if _can_change(spec) else spec for spec in specs
        )
    except SpecError as problem:
        beside = f"+{window}" if window else ""
        reason = first_line(problem)
        return Trial(kind, f"{kernel}{beside}", None, order, about, size, sinks, reason)
    return Trial(kind, _name(changed), changed, order, about, size, sinks)


def _around(spec: AttentionSpec) -> list[Part]:
    """The parts of a spec other than its kernel and its window."""
    return [part for part in spec.parts if part not in (spec.kernel, spec.window)]


def _name(specs: tuple[AttentionSpec, ...]) -> str:
    return " | ".join(dict.fromkeys(map(str, specs)))
