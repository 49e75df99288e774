"""How many orders of the series does softmax need, and does it matter about which point it is expanded?"""

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
    budget="about 30 minutes on 2 CPU cores",
    experiments=(
        Experiment(
            name="language",
            title="Next token of Python's standard library, 0.8M tokens of training",
            metric="test_loss",
            common={
                "size": "pico",
                "data": "stdlib",
                "tokenizer": "bpe:512",
                "steps": 400,
                "batch_size": 16,
                "lr": 4e-3,
                "eval_every": 100,
                "eval_rows": 128,
                "checkpoint_every": 0,
            },
            cells=cells(),
            seeds=(0, 1),
            baseline="softmax",
        ),
    ),
    claims=(
        *(
            Ordered(
                says=f"About {about}, each further pair of orders brings the loss closer to softmax.",
                source="arXiv 2507.23632, Taylor orders near 30k steps",
                paper="training ln CE: order 2 ≈ 1.345, 4 ≈ 1.245, 6, 8 slightly above, 10 ≈ softmax ≈ 1.20",
                experiment="language",
                cells=(*(f"{n} about {about}, sum" for n in range(0, HIGHEST + 1, 2)), "softmax"),
            )
            for about in ("zero", "mean")
        ),
        *(
            Ordered(
                says=f"At order {order}, expanding about the row's mean is at least as good as about zero.",
                source="this project (MATH identity 4: decisive on a pretrained model, untested in training)",
                paper="no number published",
                experiment="language",
                cells=(f"{order} about zero, sum", f"{order} about mean, sum"),
            )
            for order in (2, 4)
        ),
    ),
)
