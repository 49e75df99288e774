"""Draws the picture of the README: softmax as a sum of recurrent networks, and how fast it converges.

python docs/figures/draw.py docs/figures/overview.svg
"""

from __future__ import annotations

import math
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from maclaurin.testing import Shape, convergence

INK, PALE = "#22313f", "#e8eef4"
COLOURS = ["#7f8c8d", "#2471a3", "#1e8449", "#b9770e"]


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str, colour: str) -> None:
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02", fc=PALE, ec=colour, lw=1.8))
    axes.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=9.5, color=INK)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, curve: float = 0
) -> None:
    style = f"arc3,rad={curve}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=colour, connectionstyle=style)
    )


def draw_networks(axes: Axes) -> None:
    axes.set_xlim(0, 10.5)
    axes.set_ylim(0.5, 5.3)
    axes.axis("off")
    axes.set_title("softmax attention is a sum of recurrent networks", fontsize=11, color=INK)
    names = ["order 0\nrunning sum", "order 1\nlinear attention", "order 2", "order 3 …"]
    for n, (name, colour) in enumerate(zip(names, COLOURS, strict=True)):
        y = 4.1 - 1.15 * n
        axes.text(0.05, y + 0.38, name, va="center", fontsize=9, color=colour)
        state = r"$H_t = H_{t-1} + k_t^{\otimes %d}\, v_t^{\mathsf{T}}$" % n
        rows = ["1", "d", r"\frac{d(d+1)}{2}", r"\binom{d+2}{3}"][n]
        box(axes, 2.5, y, 3.5, 0.78, state + rf"     ${rows}\times e$", colour)
        arrow(axes, (5.6, y + 0.8), (2.9, y + 0.8), colour, curve=0.28)
        arrow(axes, (6.05, y + 0.39), (7.75, 2.75), colour)
        axes.text(
            6.2,
            y + (0.55 if n < 2 else -0.05),
            rf"$\times\, q_t^{{\otimes {n}}}/{n}!$",
            fontsize=9,
            color=colour,
        )
    box(axes, 7.8, 2.2, 0.6, 1.1, "Σ", INK)
    arrow(axes, (8.42, 2.75), (8.85, 2.75), INK)
    box(axes, 8.9, 2.2, 1.5, 1.1, "÷ row sum\nor norm\nor gate", INK)


def draw_convergence(axes: Axes) -> None:
    points = convergence(Shape(1, 64, 2, 2, 8, 8), list(range(0, 25, 2)), seed=0, size=1.0)
    orders = [p.order for p in points]
    axes.semilogy(orders, [p.about_zero for p in points], "o-", color=COLOURS[1], label="about 0")
    axes.semilogy(
        orders, [p.about_mean for p in points], "s-", color=COLOURS[3], label="about the row's mean"
    )
    bounded = [p for p in points if p.certificate < math.inf]
    axes.semilogy(
        [p.order for p in bounded], [p.certificate for p in bounded], "--", color=INK, label="certified bound"
    )
    axes.set_title("taylor(N)/sum becomes softmax", fontsize=11, color=INK)
    axes.set_xlabel("order N")
    axes.set_ylabel("largest output error / max|v|")
    axes.set_ylim(1e-13, 10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)


def main() -> None:
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4.3), layout="constrained", gridspec_kw={"width_ratios": [1.75, 1]}
    )
    draw_networks(left)
    draw_convergence(right)
    for path in sys.argv[1:]:
        figure.savefig(path, dpi=110, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    main()
