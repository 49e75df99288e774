"""How many pairs does a state of so many bytes recall?"""

from maclaurin.study import Cell, Experiment, Study
from maclaurin.study.settings import PICO_RECALL

ATTENTION = {
    "softmax": "exp/sum",
    "order 1": "taylor(1)/l2",
    "order 2": "taylor(2)/sum",
    "order 3": "taylor(3)/l2",
    "window 8": "poly(0)+window(8)/sum",
    "order 1 + window 8": "taylor(1,about=mean)+window(8)/sum",
    "order 2 + window 8": "taylor(2)+window(8)/sum",
}
#: pairs → steps: more pairs take longer to learn
STEPS = {2: 200, 4: 300, 6: 500, 8: 700}


def task(pairs: int) -> str:
    """Each pair is asked three times, with a little noise between."""
    queries = 3 * pairs
    return f"mqar:pairs={pairs},vocab=32,queries={queries},length={2 * pairs + 2 * queries + 8}"


study = Study(
    name="recall",
    title="What the orders remember",
    question=(
        "Multi-query associative recall: how does the accuracy of orders 1, 2 and 3, of windows and of "
        "softmax fall with the number of pairs, and what does it cost in bytes of state?"
    ),
    budget="about 35 minutes on 2 CPU cores",
    experiments=(
        Experiment(
            name="recall",
            title="Accuracy by attention and number of pairs",
            metric="accuracy",
            common={**PICO_RECALL, "eval_every": 100},
            cells=tuple(
                Cell(
                    f"{name}, {pairs} pairs",
                    {"attention": (notation,), "data": task(pairs), "steps": steps},
                    {"attention": name, "pairs": str(pairs)},
                )
                for pairs, steps in STEPS.items()
                for name, notation in ATTENTION.items()
            ),
            seeds=(0, 1),
            baseline="softmax, 4 pairs",
            axes=("attention", "pairs"),
        ),
    ),
)
