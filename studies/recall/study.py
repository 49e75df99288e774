"""How many pairs does a state of so many bytes recall?"""

from shared_settings import PICO_RECALL, RATES

from maclaurin.study import Behind, Experiment, Ordered, Study, cells_of

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


def experiment(pairs: int) -> Experiment:
    """One task: accuracies of different tasks cannot be compared."""
    return Experiment(
        name=f"recall-{pairs}",
        title=f"Recall of {pairs} pairs, {STEPS[pairs]} steps of training",
        metric="accuracy",
        common={**PICO_RECALL, "data": task(pairs), "steps": STEPS[pairs], "eval_every": 100},
        cells=cells_of(ATTENTION),
        seeds=(0, 1, 2),
        baseline="softmax",
        tune=RATES,
    )


study = Study(
    name="recall",
    title="What the orders remember",
    question=(
        "Multi-query associative recall: how does the accuracy of orders 1, 2 and 3, of windows and of "
        "softmax fall with the number of pairs, and what does it cost in bytes of state?"
    ),
    budget="about two hours on 2 CPU cores with the search for learning rates (estimated)",
    experiments=tuple(experiment(pairs) for pairs in STEPS),
    claims=(
        Behind(
            says="A window of 8 tokens does not recall 8 pairs.",
            experiment="recall-8",
            cells=("softmax", "window 8"),
        ),
        Ordered(
            says="With 8 pairs, each further order recalls more.",
            experiment="recall-8",
            cells=("order 1", "order 2", "order 3", "softmax"),
        ),
    ),
)
