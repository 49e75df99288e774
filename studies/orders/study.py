"""How many orders of the series does softmax need, and does it matter about which point it is expanded?"""

from paper_claims import orders_approach_softmax
from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, RATES

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
    """Even orders under a row sum and under L2; odd ones, whose row sum could vanish, under L2."""
    expansions = [
        cell(order, about, denominator)
        for about in ("zero", "mean")
        for order in range(HIGHEST + 1)
        for denominator in (("sum", "l2") if order % 2 == 0 else ("l2",))
    ]
    softmax = (Cell("softmax", {"attention": ("exp/sum",)}), Cell("norm l2", {"attention": ("exp/l2",)}))
    return (*softmax, *expansions)


study = Study(
    name="orders",
    title="How many orders does softmax need?",
    question=(
        "Taylor orders 0 to 10 of the exponential, about zero and about the row's mean score, under a row "
        "sum and under an L2 norm: how does the loss approach that of softmax?"
    ),
    budget="about 80 minutes on 2 CPU cores with the search for learning rates (estimated)",
    experiments=(
        Experiment(
            name="language",
            title=PICO_TEXT_TITLE,
            metric="loss",
            common=PICO_TEXT,
            cells=cells(),
            seeds=(0, 1, 2),
            baseline="softmax",
            tune=RATES,
        ),
    ),
    claims=(
        *(
            orders_approach_softmax(
                "language",
                *(f"{n} about {about}, sum" for n in range(0, HIGHEST + 1, 2)),
                says=f"About {about}, each further pair of orders brings the loss closer to softmax.",
            )
            for about in ("zero", "mean")
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
