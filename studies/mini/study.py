"""Which parts of softmax attention matter? The paper's questions in minutes on two cores.

Models of 0.16M parameters show the gaps between the variants, but do not write good text. Every layer starts
with the output scale of softmax (`equal_start`), and each variant trains at its own learning rate and its own
rate of the output projections, from the search recorded in tuned.json. Cells that the study gap has too have
the same runs.
"""

from paper_claims import (
    LINEAR,
    gate_does_not_stand_in,
    linear_is_behind,
    norm_stands_in,
    orders_approach_softmax,
    which_norm_hardly_matters,
)
from shared_settings import PICO_RECALL, PICO_TEXT, PICO_TEXT_TITLE, SEARCH_OF_BOTH

from maclaurin.study import Behind, Experiment, Ordered, Study, cells_of

LANGUAGE = Experiment(
    name="language",
    title=f"{PICO_TEXT_TITLE}, equal start",
    metric="loss",
    common={**PICO_TEXT, "equal_start": True},
    cells=cells_of(
        {
            "softmax": "exp/sum",
            "norm l2": "exp/l2",
            "norm rms": "exp/rms",
            "gate": "exp/len*out",
            "1/t": "exp/len",
            **LINEAR,
            "order 1": "taylor(1,about=mean)/sum",
            "order 2": "taylor(2)/sum",
            "order 4": "taylor(4)/sum",
            "order 8": "taylor(8)/sum",
        }
    ),
    seeds=(0, 1, 2),
    baseline="softmax",
    tune=SEARCH_OF_BOTH,
)

RECALL = Experiment(
    name="recall",
    title="Recall of 4 key-value pairs asked 12 times, 200 steps of training, equal start",
    metric="accuracy",
    common={
        **PICO_RECALL,
        "equal_start": True,
        "data": "mqar:pairs=4,vocab=32,queries=12,length=40",
        "steps": 200,
        "eval_every": 50,
    },
    cells=cells_of(
        {
            "softmax": "exp/sum",
            "norm l2": "exp/l2",
            "linear elu": "linear-elu",
            "order 1": "taylor(1,about=mean)/sum",
            "order 2": "taylor(2)/sum",
            "order 4": "taylor(4)/sum",
        }
    ),
    seeds=(0, 1, 2),
    baseline="softmax",
    tune=SEARCH_OF_BOTH,
)

study = Study(
    name="mini",
    title="Which parts of softmax attention matter?",
    question=(
        "Softmax attention is a sum of RNNs, one per power of the score, under a denominator. Which orders "
        "does it need, can a norm or a gate stand in for the denominator, and how far behind is its first "
        "order, linear attention?"
    ),
    budget="about 8 minutes on 2 CPU cores, at the rates of tuned.json",
    experiments=(LANGUAGE, RECALL),
    claims=(
        norm_stands_in("language", "norm l2"),
        which_norm_hardly_matters("language", "norm l2", "norm rms"),
        gate_does_not_stand_in("language", "gate", "1/t"),
        linear_is_behind("language"),
        orders_approach_softmax("language", "order 1", "order 2", "order 4", "order 8"),
        Behind(
            says="Recall needs the higher orders: first-order attention is behind softmax.",
            source="Arora et al. 2023, arXiv 2312.04927",
            note="attention solves recall that linear attention of the same width does not",
            experiment="recall",
            cells=("softmax", "order 1", "linear elu"),
        ),
        Ordered(
            says="More orders recall more.",
            experiment="recall",
            cells=("order 1", "order 2", "order 4", "softmax"),
        ),
    ),
)
