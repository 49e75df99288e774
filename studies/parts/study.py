"""Every row of the paper's code: which of its 38 ablations matter?"""

from maclaurin import catalogue
from maclaurin.study import Experiment, Study, Tied, cells_of
from maclaurin.study.paper import which_norm_hardly_matters
from maclaurin.study.settings import PICO_TEXT, PICO_TEXT_TITLE

#: rows of the paper's code, and the baseline it calls softmax
ROWS = [entry for entry in catalogue if entry.aliases or entry.name in ("softmax", "norm")]

study = Study(
    name="parts",
    title="Every ablation of the paper's code",
    question=(
        "The paper's public code names 38 variants; those of equal formulas are one row here. Trained alike, "
        "which parts of softmax attention matter?"
    ),
    budget="about 25 minutes on 2 CPU cores",
    experiments=(
        Experiment(
            name="language",
            title=PICO_TEXT_TITLE,
            metric="test_loss",
            common=PICO_TEXT,
            cells=cells_of({entry.name: entry.name for entry in ROWS}),
            seeds=(0, 1),
            baseline="softmax",
        ),
    ),
    claims=(
        which_norm_hardly_matters("language", "softmax", "norm", "clamped-rms", "length-layer"),
        Tied(
            says="A gate before a norm does nothing: it divides out.",
            source="this project",
            paper="equal by algebra",
            experiment="language",
            cells=("norm", "norm-gated-before"),
            within=0.05,
        ),
    ),
)
