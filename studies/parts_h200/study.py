"""The parts of attention at 17M parameters on prose, each at its own learning rate, all at the same start.

python benchmarks/corpus.py prose.jsonl.xz
maclaurin study parts_h200 --workers 6
"""

from paper_claims import (
    MARGIN,
    MARGIN_REASON,
    gate_does_not_stand_in,
    norm_stands_in,
    which_norm_hardly_matters,
)
from shared_settings import H200_PROSE

from maclaurin.study import Alike, Behind, Experiment, Ordered, Study, Tune, cells_of

CELLS = {
    "softmax": "exp/sum",
    "norm l2": "exp/l2",
    "norm rms": "exp/rms",
    "norm layer": "exp/layer",
    "gate": "exp/len*out",
    "1/t": "exp/len",
    "linear elu": "linear(elu1)/sum",
    "linear relu": "linear(relu)/sum",
    "linear cosine": "linear(cosine)",
    "order 1 about mean": "taylor(1,about=mean)/sum",
    "order 2": "taylor(2)/sum",
    "order 4": "taylor(4)/sum",
    "order 2 about mean": "taylor(2,about=mean)/sum",
    "norm l2, gate": "exp/l2*out",
}
#: cells whose output projections have a tuned rate too
BOTH = {
    name: CELLS[name]
    for name in (
        "softmax", "norm l2", "norm rms", "norm layer", "gate", "linear elu", "order 2", "order 2 about mean",
        "order 4",
    )
}  # fmt: skip

study = Study(
    name="parts-h200",
    title="Which parts matter at 17M parameters",
    question=(
        "Norms, gates, 1/t, linear attention and Taylor orders on English prose and documentation, every "
        "variant tuned and every layer with softmax's output scale at the start: what is behind softmax, "
        "and by how much?"
    ),
    budget="about 20 minutes on one H200, six to eight runs at a time",
    experiments=(
        Experiment(
            name="language",
            title="Next token of prose and documentation, 17M parameters, 9.8M tokens, equal start",
            metric="loss",
            common={**H200_PROSE, "size": "mini"},
            cells=cells_of(CELLS),
            seeds=(1, 2, 3),
            baseline="softmax",
            tune=Tune(rates=(1e-3, 2e-3), seeds=(0,)),
        ),
        Experiment(
            name="both rates",
            title="The same, with a tuned rate for the output projections of attention too",
            metric="loss",
            common={**H200_PROSE, "size": "mini"},
            cells=cells_of(BOTH),
            seeds=(1, 2, 3),
            baseline="softmax",
            tune=Tune(rates=(1e-3, 2e-3), factors=(0.25, 0.5, 1), seeds=(0,)),
        ),
    ),
    claims=(
        norm_stands_in("language", "norm l2"),
        which_norm_hardly_matters("language", "norm l2", "norm rms", "norm layer"),
        gate_does_not_stand_in("language", "gate", "1/t"),
        Behind(
            says="Linear attention, whatever its feature map, is behind softmax.",
            experiment="language",
            cells=("softmax", "linear elu", "linear relu", "linear cosine"),
        ),
        Ordered(
            says="Each further order of the series brings the loss closer to softmax.",
            experiment="language",
            cells=("order 1 about mean", "order 2", "order 4", "softmax"),
        ),
        norm_stands_in("both rates", "norm l2"),
        which_norm_hardly_matters("both rates", "norm l2", "norm rms", "norm layer"),
        gate_does_not_stand_in("both rates", "gate"),
        Ordered(
            says="Each further order of the series brings the loss closer to softmax, linear attention last.",
            experiment="both rates",
            cells=("linear elu", "order 2", "order 4", "softmax"),
        ),
        Alike(
            says="A gate after the norm adds nothing.",
            experiment="language",
            cells=("norm l2", "norm l2, gate"),
            within=MARGIN,
            because=MARGIN_REASON,
        ),
    ),
)
