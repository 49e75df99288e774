"""How many orders of the series does softmax need, and does the centre of the expansion matter?"""

from paper_claims import orders_approach_softmax
from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, SEARCH_OF_BOTH

from maclaurin.study import Cell, Experiment, Ordered, Study

HIGHEST = 10


def cell(order: int, about: str, denominator: str) -> Cell:
    """One expansion of exp under one denominator."""
    point = "" if about == "zero" else ",about=mean"
    return Cell(
        f"{order} about {about}, {denominator}",
        {"attention": (f"taylor({order}{point})/{denominator}",)},
        {"order": str(order), "about": about, "denominator": denominator},
    )


def cells() -> tuple[Cell, ...]:
    """Even orders under a row sum, about zero and the mean; orders 1 to 5 under L2.

    The row sum of an odd order can vanish, except that of order 1 about the mean. Order 0 does not depend on
    the centre.
    """
    even = range(2, HIGHEST + 1, 2)
    return (
        Cell("softmax", {"attention": ("exp/sum",)}),
        Cell("norm l2", {"attention": ("exp/l2",)}),
        *(cell(order, "zero", "sum") for order in (0, *even)),
        *(cell(order, "mean", "sum") for order in (1, *even)),
        *(cell(order, "zero", "l2") for order in range(1, 6)),
    )


study = Study(
    name="orders",
    title="How many orders does softmax need?",
    question=(
        "Taylor orders 0 to 10 of the exponential, about zero and about the row's mean score, under a row "
        "sum and under an L2 norm: how does the loss approach that of softmax?"
    ),
    budget="about 50 minutes on 2 CPU cores with the search for learning rates; shares runs with gap",
    experiments=(
        Experiment(
            name="language",
            title=f"{PICO_TEXT_TITLE}, equal start",
            metric="loss",
            common={**PICO_TEXT, "equal_start": True},
            cells=cells(),
            seeds=(0, 1, 2, 3, 4),
            baseline="softmax",
            tune=SEARCH_OF_BOTH,
        ),
    ),
    claims=(
        *(
            orders_approach_softmax(
                "language",
                *(f"{n} about {about}, sum" for n in (first, *range(2, HIGHEST + 1, 2))),
                says=f"About {about}, each further pair of orders brings the loss closer to softmax.",
            )
            for about, first in (("zero", 0), ("mean", 1))
        ),
        *(
            Ordered(
                says=f"At order {order}, expanding about the row's mean is better than about zero.",
                note="decisive on a pretrained model, an open question in training",
                experiment="language",
                cells=(f"{order} about zero, sum", f"{order} about mean, sum"),
            )
            for order in (2, 4)
        ),
    ),
)
