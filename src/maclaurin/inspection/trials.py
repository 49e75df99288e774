"""Which attentions the whole model is tried with, and how they are put in its layers for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from maclaurin.errors import InputError, SpecError
from maclaurin.inspection.schema import About, Kind
from maclaurin.inspection.settings import Settings
from maclaurin.layers.attention import AttentionLayer
from maclaurin.spec import AttentionSpec, Kernel, Part, Poly, SlidingWindow, Taylor, Window


@final
@dataclass(frozen=True)
class Trial:
    """One attention for all layers that take one; `specs` is None where it has no meaning, as `note` says."""

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
        """About how long it takes, the model's own attention being 1."""
        return 1 + (self.order or 0) * (0.1 if self.about == "mean" else 0.04) + (0.5 if self.window else 0)


def check_layers(name: str, layers: list[AttentionLayer]) -> None:
    """Raise unless every layer weighs keys by exp of a score, or by a polynomial that stands for it."""
    for number, layer in enumerate(layers):
        kernel = layer.spec.kernel
        if kernel.feature_map is not None or not (kernel.is_exact_exp or kernel.expands_exp):
            raise InputError(
                f"{name}: layer {number} has the attention {layer.spec}, whose kernel is no exp and stands "
                "for none, so there is no series to look at. Inspect a model with exp or taylor(N)."
            )


def trials(specs: list[AttentionSpec], settings: Settings, context: int) -> list[Trial]:
    """The model's own attention; every order about zero and about the mean; every window with its tails."""
    found = [Trial("own", _name(tuple(specs)), tuple(specs))]
    if not any(_can_change(spec) for spec in specs):
        return found
    abouts: tuple[About, ...] = ("zero", "mean")
    found += [_order(specs, order, about) for about in abouts for order in settings.orders]
    for size in settings.windows:
        if size < context:
            tails = (None, *settings.tail_orders)
            found += [_window(specs, order, size, settings.sinks) for order in tails]
    return found


@contextmanager
def exchanged(layers: list[AttentionLayer], specs: tuple[AttentionSpec, ...]) -> Iterator[None]:
    """The layers with other specs, and their own again afterwards."""
    own = [layer.spec for layer in layers]
    try:
        for layer, spec in zip(layers, specs, strict=True):
            layer.spec = spec
        yield
    finally:
        for layer, spec in zip(layers, own, strict=True):
            layer.spec = spec


def _can_change(spec: AttentionSpec) -> bool:
    """A layer with a window of its own stays: its memory is constant already."""
    return spec.window is None


def _order(specs: list[AttentionSpec], order: int, about: About) -> Trial:
    return _trial("order", specs, Taylor(order, about=about), None, order=order, about=about)


def _window(specs: list[AttentionSpec], order: int | None, size: int, sinks: int) -> Trial:
    kernel = Poly((0.0,)) if order is None else Taylor(order, about="mean")
    about: About | None = None if order is None else "mean"
    window = SlidingWindow(size, sinks=sinks)
    return _trial("window", specs, kernel, window, order=order, about=about)


def _trial(
    kind: Kind,
    specs: list[AttentionSpec],
    kernel: Kernel,
    window: Window | None,
    *,
    order: int | None,
    about: About | None,
) -> Trial:
    size, sinks = (None, None) if window is None else (window.size, window.sinks)
    try:
        changed = tuple(
            AttentionSpec.of(kernel, window, *_around(spec)) if _can_change(spec) else spec for spec in specs
        )
    except SpecError as problem:
        beside = f"+{window}" if window else ""
        reason = str(problem).splitlines()[0]
        return Trial(kind, f"{kernel}{beside}", None, order, about, size, sinks, reason)
    return Trial(kind, _name(changed), changed, order, about, size, sinks)


def _around(spec: AttentionSpec) -> list[Part]:
    """The parts of a spec beside its kernel and its window."""
    return [part for part in spec.parts if part not in (spec.kernel, spec.window)]


def _name(specs: tuple[AttentionSpec, ...]) -> str:
    return " | ".join(dict.fromkeys(map(str, specs)))
