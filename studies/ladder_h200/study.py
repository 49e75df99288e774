"""Seven attentions at 5M, 17M and 60M parameters: do ranks hold, and where does the gap to softmax go?

    python benchmarks/corpus.py prose.jsonl.xz
    maclaurin study ladder_h200 --workers 4

All weights have one learning rate; the study `ladder` searches the rate of the output projections too.
"""

from paper_claims import gate_does_not_stand_in, norm_stands_in
from shared_settings import H200_PROSE

from maclaurin.study import Behind, Cell, Experiment, Ordered, Study

#: name → (notation, learning rate tuned at 17M parameters: the study parts-h200)
CELLS = {
    "softmax": ("exp/sum", 2e-3),
    "norm l2": ("exp/l2", 2e-3),
    "gate": ("exp/len*out", 1e-3),
    "linear elu": ("linear(elu1)/sum", 2e-3),
    "order 2": ("taylor(2)/sum", 2e-3),
    "order 2 about mean": ("taylor(2,about=mean)/sum", 2e-3),
    "order 4": ("taylor(4)/sum", 2e-3),
}


def rung(name: str, size: str, factor: float) -> Experiment:
    """The cells at one size; `factor` is what the rule makes of the rates tuned at 17M."""
    return Experiment(
        name=name,
        title=f"{name.upper()} parameters, 9.8M tokens of prose and documentation",
        metric="loss",
        common={**H200_PROSE, "size": size},
        cells=tuple(
            Cell(cell, {"attention": (notation,), "lr": rate * factor})
            for cell, (notation, rate) in CELLS.items()
        ),
        seeds=(1, 2, 3),
        baseline="softmax",
    )


study = Study(
    name="ladder-h200",
    title="From 5M to 60M parameters",
    question=(
        "Softmax, the L2 norm, the gate, linear attention and Taylor orders at three sizes on the same text: "
        "do ranks hold from one size to the next, and where does the gap to softmax go?"
    ),
    budget="about 20 minutes on one H200, four runs at a time",
    experiments=(rung("5m", "5m", 2.0), rung("17m", "mini", 1.0), rung("60m", "60m", 0.5)),
    ladder=("5m", "17m", "60m"),
    claims=(  # those of parts-h200 about these cells, at the largest size
        norm_stands_in("60m", "norm l2"),
        gate_does_not_stand_in("60m", "gate"),
        Behind(
            says="Linear attention is behind softmax.",
            experiment="60m",
            cells=("softmax", "linear elu"),
        ),
        Ordered(
            says="Each further order of the series brings the loss closer to softmax.",
            experiment="60m",
            cells=("order 2", "order 4", "softmax"),
        ),
    ),
)
