"""Every row of the paper's code: which of its 38 ablations matter?"""

from maclaurin import catalogue
from maclaurin.study import Experiment, Study, Tied, cells_of

PAPER = "arXiv 2507.23632"
#: rows of the paper's code, and the baseline it calls softmax
ROWS = [entry for entry in catalogue if entry.aliases or entry.name in ("softmax", "norm")]

study = Study(
    name="parts",
    title="Every ablation of the paper's code",
    question=(
        "The paper's public code names 38 variants, which are 32 different ones. Trained alike, which parts "
        "of softmax attention matter?"
    ),
    budget="about 30 minutes on 2 CPU cores",
    experiments=(
        Experiment(
            name="language",
            title="Next token of Python's standard library, 0.8M tokens of training",
            metric="test_loss",
            common={
                "size": "pico",
                "data": "stdlib",
                "tokenizer": "bpe:512",
                "steps": 400,
                "batch_size": 16,
                "lr": 4e-3,
                "eval_every": 100,
                "eval_rows": 128,
                "checkpoint_every": 0,
            },
            cells=cells_of({entry.name: entry.name for entry in ROWS}),
            seeds=(0, 1),
            baseline="softmax",
        ),
    ),
    claims=(
        Tied(
            says="exp and a norm are what matters; which norm (row sum, L2, RMS, Layer) hardly does.",
            source=f"{PAPER}, ablation of the parts",
            paper="row sum, L2, RMS and Layer close together",
            experiment="language",
            cells=("softmax", "norm", "clamped-rms", "length-layer"),
            within=0.05,
        ),
        Tied(
            says="A gate before a norm does nothing: it divides out (MATH identity 1).",
            source="this project",
            paper="equal by algebra",
            experiment="language",
            cells=("norm", "norm-gated-before"),
            within=0.05,
        ),
    ),
)
