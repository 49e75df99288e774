"""Colours and lines that all our figures share."""

from __future__ import annotations

from typing import Any

#: Okabe and Ito's palette, darkened where white paper asks for it
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8579b", "#c88a00", "#3a9bd9", "#7a6a00")
INK = "#1b1f24"

#: for figures drawn with matplotlib
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vPX"
WIDTH = 6.5
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "lines.linewidth": 1.3,
    "pdf.fonttype": 42,
    "svg.hashsalt": "maclaurin",
}
