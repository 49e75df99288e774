"""Why is softmax ahead of linear attention? The way from one to the other, part by part.

Every combination of parts that has a meaning is trained, at its own learning rate, and every layer starts
with the output scale of softmax (`equal_start`). The trained models are then tested on ends of held-out
lines of source: the accuracy and the log-odds of the right answer have their own waterfalls, from the same
runs.
"""

import dataclasses

from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, SEARCH_OF_BOTH
from ways_to_softmax import FROM_LINEAR, TO_GATED_NORM, TO_GATED_SOFTMAX, TO_NORM, TO_SOFTMAX, cells

from maclaurin.study import Experiment, Study, Tasks

#: switches: feature map, orders, about the mean, denominator (row sum or L2 norm), output gate
WAYS = (FROM_LINEAR, TO_SOFTMAX, TO_NORM, TO_GATED_SOFTMAX, TO_GATED_NORM)
LANGUAGE = Experiment(
    name="language",
    title=f"{PICO_TEXT_TITLE}, equal start",
    metric="loss",
    common={**PICO_TEXT, "equal_start": True},
    cells=cells(*WAYS),
    seeds=(0, 1, 2, 3, 4),
    baseline="softmax",
    tune=SEARCH_OF_BOTH,
    waterfalls=WAYS,
    tasks=Tasks(("lines_32",), items=250),
)

study = Study(
    name="gap",
    title="Why softmax is ahead of linear attention",
    question=(
        "From linear attention to softmax in single parts: what does each contribute, averaged over the "
        "orders in which the parts can be added, and which of them need each other?"
    ),
    budget="about 2 hours on 2 CPU cores with the search for learning rates (estimated)",
    experiments=(
        LANGUAGE,
        dataclasses.replace(
            LANGUAGE,
            name="lines",
            title="Ends of held-out lines: to which of four beginnings? 1,000 questions, chance 0.25",
            metric="task:lines_32",
        ),
        dataclasses.replace(
            LANGUAGE,
            name="lines, log-odds",
            title="The same answers by the log-odds of the right one, 0 where it has half of the probability",
            metric="task:lines_32:log_odds",
        ),
    ),
)
