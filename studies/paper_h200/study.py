"""The paper's questions at a budget of minutes per run on one H200: 13.8M parameters, 16M tokens a run.

python benchmarks/python_sources.py sources.jsonl --megabytes 80
maclaurin study paper-h200 --workers 8
"""

from maclaurin.study import Experiment, Study, cells_of
from maclaurin.study.paper import (
    LINEAR,
    gate_does_not_stand_in,
    linear_is_behind,
    norm_stands_in,
    order_is_enough,
    orders_approach_softmax,
    which_norm_hardly_matters,
)

ORDERS = (2, 4, 6, 8, 10)
COMMON = {
    "size": "mini",
    "data": "sources.jsonl",
    "tokenizer": "bpe:4096",
    "steps": 500,
    "batch_size": 64,
    "lr": 2e-3,
    "warmup": 50,
    "precision": "bf16",
    "eval_every": 125,
    "eval_rows": 256,
    "final_rows": 0,
    "checkpoint_every": 0,
}

study = Study(
    name="paper-h200",
    title="The paper's questions on one H200",
    question=(
        "Softmax, norms, gate, 1/t, linear attention and Taylor orders 1 to 10, three seeds each, at 13.8M "
        "parameters on 16M tokens of Python source: which of the paper's orderings show?"
    ),
    budget="about 17 minutes on one H200, eight or nine runs at a time",
    experiments=(
        Experiment(
            name="language",
            title="Next token of Python source, 13.8M parameters, 16M tokens of training",
            metric="test_loss",
            common=COMMON,
            cells=cells_of(
                {
                    "softmax": "exp/sum",
                    "norm l2": "exp/l2",
                    "norm rms": "exp/rms",
                    "gate": "exp/len*out",
                    "1/t": "exp/len",
                    **LINEAR,
                    "order 1": "taylor(1)/l2",
                    **{f"order {n}": f"taylor({n})/sum" for n in ORDERS},
                }
            ),
            seeds=(0, 1, 2),
            baseline="softmax",
        ),
        Experiment(
            name="longer",
            title="The same with 33M tokens, at half the learning rate",
            metric="test_loss",
            common={**COMMON, "steps": 1000, "lr": 1e-3, "warmup": 100, "eval_every": 250},
            cells=cells_of({"softmax": "exp/sum", "norm l2": "exp/l2", "gate": "exp/len*out"}),
            seeds=(0, 1, 2),
            baseline="softmax",
        ),
    ),
    claims=(
        norm_stands_in("language", "norm l2"),
        which_norm_hardly_matters("language", "norm l2", "norm rms"),
        gate_does_not_stand_in("language", "gate", "1/t"),
        linear_is_behind("language"),
        orders_approach_softmax("language", *(f"order {n}" for n in ORDERS)),
        order_is_enough("language", "order 10"),
        norm_stands_in("longer", "norm l2"),
        gate_does_not_stand_in("longer", "gate"),
    ),
)
