"""Seven attentions from 5M to 60M parameters, each with its own rates, and four of them at 275M.

    python benchmarks/corpus.py prose.jsonl.xz
    maclaurin study ladder --workers 6

Learning rate and rate of the output projections are searched at 5M and 17M. They follow from those by a rule
at 60M, where the rule is tested, and at 275M, where a cell is trained again at half the rate if it diverges.
"""

from paper_claims import gate_does_not_stand_in, norm_stands_in
from shared_settings import H200_PROSE

from maclaurin.study import Behind, Carried, Experiment, Ordered, Study, Tune, cells_of

CELLS = {
    "softmax": "exp/sum",
    "norm l2": "exp/l2",
    "gate": "exp/len*out",
    "linear elu": "linear(elu1)/sum",
    "order 2": "taylor(2)/sum",
    "order 2 about mean": "taylor(2,about=mean)/sum",
    "order 4": "taylor(4)/sum",
}
LARGEST = ("softmax", "norm l2", "gate", "linear elu")
#: the search of parts-h200, so that both studies share its runs
SEARCH = Tune(rates=(1e-3, 2e-3), factors=(0.25, 0.5, 1.0), seeds=(0,))
#: names of the experiments that search
SEARCHED = ("5m", "17m")
#: 150M tokens in ten minutes of one H200; a checkpoint is about a minute of work
LONG = {
    "size": "small",
    "batch_size": 128,
    "steps": 2290,
    "warmup": 229,
    "eval_every": 572,
    "checkpoint_every": 229,
}


def rung(name: str, size: str, tune: Tune | Carried) -> Experiment:
    """The cells at one size."""
    return Experiment(
        name=name,
        title=f"{name.upper()} parameters, 9.8M tokens of prose and documentation",
        metric="loss",
        common={**H200_PROSE, "size": size},
        cells=cells_of(CELLS),
        seeds=(1, 2, 3),
        baseline="softmax",
        tune=tune,
    )


study = Study(
    name="ladder",
    title="From 5M to 275M parameters",
    question=(
        "Softmax, the L2 norm, the gate, linear attention and Taylor orders at several sizes on the same "
        "text, each with its own learning rate and rate of the output projections: do ranks hold from one "
        "size to the next, and where does the gap to softmax go?"
    ),
    budget="about two hours on one H200, 40 minutes of them for one seed of four cells at 275M parameters",
    experiments=(
        rung("5m", "5m", SEARCH),
        rung("17m", "mini", SEARCH),
        rung("60m", "60m", Carried(SEARCHED, seeds=(0,))),
        Experiment(
            name="275m",
            title="275M parameters (226M with this vocabulary), 150M tokens, one seed",
            metric="loss",
            common={**H200_PROSE, **LONG},
            cells=cells_of({name: CELLS[name] for name in LARGEST}),
            seeds=(1,),
            baseline="softmax",
            tune=Carried(SEARCHED, tests=(), halvings=2),
            at_once=1,
        ),
    ),
    ladder=("5m", "17m", "60m"),
    claims=(  # those of parts-h200 about these cells, at the largest size of three seeds
        norm_stands_in("60m", "norm l2"),
        gate_does_not_stand_in("60m", "gate"),
        Behind(
            says="Linear attention is behind softmax.",
            experiment="60m",
            cells=("softmax", "linear elu"),
        ),
        Ordered(
            says="Each further order of the series brings the loss closer to softmax, linear attention last.",
            experiment="60m",
            cells=("linear elu", "order 2", "order 4", "softmax"),
        ),
    ),
)
