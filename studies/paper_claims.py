"""The claims of arXiv 2507.23632, as claims about the cells of an experiment.

The paper plots the logarithm of the cross-entropy (ln CE); its numbers are read off the plots. Reports show
them as cross-entropy in nats, like our own.
"""

from maclaurin.study import Alike, Behind, Claim, Ordered, Published

PAPER = "arXiv 2507.23632"
LINEAR = {"linear elu": "linear-elu", "linear relu": "linear-relu", "linear cosine": "linear-cosine"}
"""The linear attentions of the paper: cell → catalogue name."""

#: in nats per token
MARGIN = 0.02
MARGIN_REASON = (
    "half of the smallest gap that the paper calls a difference: its gate is 0.017 behind softmax in ln CE "
    "on the Pile, which is 0.044 nats"
)

PILE = "300M on the Pile, 90k steps"
FINEWEB = "2B on FineWeb, 60k steps"
LONG = "length 4096 on FineWeb, 20k steps"


def norm_stands_in(experiment: str, norm: str) -> Claim:
    """Softmax and its norm variant perform alike."""
    return Alike(
        says="The denominator can be a vector norm: softmax and the L2 norm perform alike.",
        source=PAPER,
        published=(
            Published(where=PILE, unit="ln CE", values={"softmax": 0.945, "norm": 0.945}),
            Published(where=FINEWEB, unit="ln CE", values={"softmax": 0.960, "norm": 0.963}),
        ),
        experiment=experiment,
        cells=("softmax", norm),
        within=MARGIN,
        because=MARGIN_REASON,
    )


def which_norm_hardly_matters(experiment: str, *norms: str) -> Claim:
    """The norms perform alike."""
    return Alike(
        says="Which norm (row sum, L2, RMS, Layer) hardly matters.",
        source=f"{PAPER}, ablation of the parts",
        note="row sum, L2, RMS and Layer close together",
        experiment=experiment,
        cells=norms,
        within=MARGIN,
        because=MARGIN_REASON,
    )


def gate_does_not_stand_in(experiment: str, *gates: str) -> Claim:
    """A gate instead of the denominator is behind."""
    return Behind(
        says="A gate (or 1/t alone) cannot stand in for the denominator as well.",
        source=PAPER,
        published=(
            Published(where=PILE, unit="ln CE", values={"softmax": 0.945, "gate": 0.962}),
            Published(where=FINEWEB, unit="ln CE", values={"softmax": 0.960, "gate": 0.987}),
            Published(where=LONG, unit="ln CE", values={"softmax": 1.151, "gate": 1.170}),
        ),
        experiment=experiment,
        cells=("softmax", *gates),
    )


def linear_is_behind(experiment: str) -> Claim:
    """All of LINEAR are behind softmax."""
    return Behind(
        says="Linear attention, whatever its feature map, is behind softmax.",
        source=f"{PAPER}, all three data sets",
        note="elu, relu and cosine clearly behind softmax",
        experiment=experiment,
        cells=("softmax", *LINEAR),
    )


#: training loss near 30k steps
ORDERS = Published(
    where="training loss near 30k steps; orders 6 and 8 slightly above order 10",
    unit="ln CE",
    values={"order 2": 1.345, "order 4": 1.245, "order 10": 1.20, "softmax": 1.20},
)


def orders_approach_softmax(experiment: str, *cells: str, says: str | None = None) -> Claim:
    """Cells of rising order, softmax last, get better and better."""
    return Ordered(
        says=says or "Each further order of the series brings the loss closer to softmax.",
        source=PAPER,
        published=(ORDERS,),
        experiment=experiment,
        cells=(*cells, "softmax"),
    )


def order_is_enough(experiment: str, cell: str) -> Claim:
    """A high order performs like softmax."""
    return Alike(
        says=f"{cell[0].upper()}{cell[1:]} is as good as softmax.",
        source=PAPER,
        published=(ORDERS,),
        experiment=experiment,
        cells=("softmax", cell),
        within=MARGIN,
        because=MARGIN_REASON,
    )
