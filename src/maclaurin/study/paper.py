"""What arXiv 2507.23632 claims, as claims about the cells of an experiment."""

from __future__ import annotations

from maclaurin.study.claim import Behind, Claim, Ordered, Tied

PAPER = "arXiv 2507.23632"
LINEAR = {"linear elu": "linear-elu", "linear relu": "linear-relu", "linear cosine": "linear-cosine"}
"""Linear attention as the paper runs it: cell → catalogue name."""


def norm_stands_in(experiment: str, norm: str, *, within: float = 0.05) -> Claim:
    """Softmax and its norm variant perform alike."""
    return Tied(
        says="The denominator can be a vector norm: softmax and the L2 norm perform alike.",
        source=f"{PAPER}, 300M on the Pile at 90k steps; 2B on FineWeb at 60k",
        paper="ln CE: softmax ≈ norm ≈ 0.945; softmax 0.960, norm 0.963",
        experiment=experiment,
        cells=("softmax", norm),
        within=within,
    )


def which_norm_hardly_matters(experiment: str, *norms: str, within: float = 0.05) -> Claim:
    """The norms perform alike."""
    return Tied(
        says="Which norm (row sum, L2, RMS, Layer) hardly matters.",
        source=f"{PAPER}, ablation of the parts",
        paper="row sum, L2, RMS and Layer close together",
        experiment=experiment,
        cells=norms,
        within=within,
    )


def gate_does_not_stand_in(experiment: str, *gates: str) -> Claim:
    """A gate instead of the denominator is behind."""
    return Behind(
        says="A gate (or 1/t alone) cannot stand in for the denominator as well.",
        source=f"{PAPER}, 300M on the Pile at 90k steps; 2B on FineWeb at 60k; length 4096 at 20k",
        paper="ln CE: softmax ≈ 0.945, gate ≈ 0.962; 0.960, 0.987; 1.151, 1.170",
        experiment=experiment,
        cells=("softmax", *gates),
    )


def linear_is_behind(experiment: str) -> Claim:
    """All of LINEAR are behind softmax."""
    return Behind(
        says="Linear attention, whatever its feature map, is clearly behind softmax.",
        source=f"{PAPER}, all three data sets",
        paper="elu, relu and cosine clearly behind softmax",
        experiment=experiment,
        cells=("softmax", *LINEAR),
    )


def orders_approach_softmax(experiment: str, *cells: str, says: str | None = None) -> Claim:
    """Cells of rising order, softmax last, get better and better."""
    return Ordered(
        says=says or "Each further order of the series brings the loss closer to softmax.",
        source=f"{PAPER}, Taylor orders near 30k steps",
        paper="training ln CE: order 2 ≈ 1.345, 4 ≈ 1.245, 6 and 8 slightly above, 10 ≈ softmax ≈ 1.20",
        experiment=experiment,
        cells=(*cells, "softmax"),
    )


def order_is_enough(experiment: str, cell: str, *, within: float = 0.05) -> Claim:
    """A high order performs like softmax."""
    return Tied(
        says=f"{cell[0].upper()}{cell[1:]} is as good as softmax.",
        source=f"{PAPER}, Taylor orders near 30k steps",
        paper="training ln CE: 10 ≈ softmax ≈ 1.20",
        experiment=experiment,
        cells=("softmax", cell),
        within=within,
    )
