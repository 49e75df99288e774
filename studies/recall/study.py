"""What do the orders remember, and what does each part contribute on the way to softmax?"""

import dataclasses

from shared_settings import PICO_RECALL, SEARCH_OF_BOTH
from ways_to_softmax import FROM_LINEAR, TO_NORM, TO_SOFTMAX, cells

from maclaurin.study import Behind, Experiment, Ordered, Study, cells_of

WAYS = (FROM_LINEAR, TO_SOFTMAX, TO_NORM)
OTHERS = {
    "order 2, row sum, output gate": "taylor(2)/sum*out",
    "order 2, row sum, forget gate": "taylor(2)*forget/sum",
    "order 2, row sum, input gate": "taylor(2)*in/sum",
    "linear elu, row sum, forget gate": "linear(elu1)*forget/sum",
    "window 8": "poly(0)+window(8)/sum",
    "window 16": "poly(0)+window(16)/sum",
    "window 32": "poly(0)+window(32)/sum",
    "order 2 + window 8": "taylor(2)+window(8)/sum",
}
#: cells of the harder task: every order under a row sum, both other denominators, gates and windows
HARDER = (
    "softmax", "linear elu, row sum", "order 1 about mean, row sum", "order 2, row sum", "order 4, row sum",
    "exp, 1/t", "exp, L2",
)  # fmt: skip

FOUR = Experiment(
    name="recall",
    title="Recall of 4 key-value pairs asked 12 times, 300 steps of training, equal start",
    metric="accuracy",
    common={
        **PICO_RECALL,
        "equal_start": True,
        "data": "mqar:pairs=4,vocab=32,queries=12,length=40",
        "steps": 300,
        "eval_every": 100,
    },
    cells=(*cells(*WAYS), *cells_of(OTHERS)),
    seeds=(0, 1, 2, 3, 4),
    baseline="softmax",
    tune=SEARCH_OF_BOTH,
    waterfalls=WAYS,
)
EIGHT = dataclasses.replace(
    FOUR,
    name="8 pairs",
    title="Recall of 8 key-value pairs asked 24 times, 600 steps of training, equal start",
    common={**FOUR.common, "data": "mqar:pairs=8,vocab=32,queries=24,length=72", "steps": 600},
    cells=(*(cell for cell in FOUR.cells if cell.name in HARDER), *cells_of(OTHERS)),
    waterfalls=(),
)

study = Study(
    name="recall",
    title="What the orders remember",
    question=(
        "Multi-query associative recall: how accurate are the orders, gates and windows beside softmax, what "
        "does it cost in bytes of memory, and which parts on the way from linear attention add to it?"
    ),
    budget="about 3 hours on 2 CPU cores with the search for learning rates (estimated)",
    experiments=(FOUR, EIGHT),
    claims=(
        Behind(
            says="A window of 8 tokens does not recall 4 pairs.",
            experiment="recall",
            cells=("softmax", "window 8"),
        ),
        Behind(
            says="Linear attention recalls less than softmax.",
            source="Arora et al. 2023, arXiv 2312.04927",
            experiment="recall",
            cells=("softmax", "linear elu, row sum"),
        ),
        Ordered(
            says="Under a row sum, each further order recalls more.",
            experiment="recall",
            cells=("order 1 about mean, row sum", "order 2, row sum", "order 4, row sum", "softmax"),
        ),
        Behind(
            says="A window of 16 tokens does not recall 8 pairs.",
            experiment="8 pairs",
            cells=("softmax", "window 16"),
        ),
    ),
)
