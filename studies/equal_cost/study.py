"""Softmax, a window, linear attention and order 2 at the same bytes of memory, and at the same FLOPs.

At 0.16M parameters softmax keeps 1 KiB of keys and values per token, and the state of order 2 has 289 KiB.
So on rows of 128 tokens softmax is the smaller one; here rows have 512 tokens. Under `equal="state"` softmax
is a window of 289 tokens, and order 1 has a window of 273 beside its state.
"""

import dataclasses

from shared_settings import PICO_TEXT, SEARCH_OF_BOTH

from maclaurin.study import Behind, Experiment, Study, cells_of

#: 300 steps of 4 rows of 512 tokens: as many tokens as in the other studies at this size
LONG_ROWS = {**PICO_TEXT, "length": 512, "batch_size": 4, "eval_rows": 32, "final_rows": 256}

bytes_ = Experiment(
    name="state",
    title="Next token of Python's standard library in rows of 512, equal bytes of memory, equal start",
    metric="loss",
    common={**LONG_ROWS, "equal_start": True},
    cells=cells_of(
        {
            "order 2": "taylor(2)/sum",
            "window 289": "poly(0)+window(289)/sum",
            "order 1 about mean + window 273": "taylor(1,about=mean)+window(273)/sum",
        }
    ),
    seeds=(0, 1, 2, 3, 4),
    baseline="order 2",
    tune=SEARCH_OF_BOTH,
    equal="state",
)
flops = dataclasses.replace(
    bytes_,
    name="flops",
    title="The same text at equal training FLOPs, equal start",
    cells=cells_of(
        {
            "softmax": "exp/sum",
            "window 64": "poly(0)+window(64)/sum",
            "linear elu": "linear-elu",
            "order 2": "taylor(2)/sum",
        }
    ),
    baseline="softmax",
    equal="flops",
)

study = Study(
    name="equal-cost",
    title="At equal bytes, at equal FLOPs",
    question=(
        "Which attention is best for a given memory of the past, and which for a given number of operations?"
    ),
    budget="about 70 minutes on 2 CPU cores with the search for learning rates (estimated)",
    experiments=(bytes_, flops),
    claims=(
        Behind(
            says="With the bytes of its state spent on a window, softmax is ahead of order 2.",
            experiment="state",
            cells=("window 289", "order 2"),
        ),
        Behind(
            says="At equal FLOPs linear attention is behind softmax.",
            experiment="flops",
            cells=("softmax", "linear elu"),
        ),
    ),
)
