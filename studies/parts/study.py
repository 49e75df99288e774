"""Every row of the paper's code: which of its 38 ablations matter?"""

from paper_claims import MARGIN, MARGIN_REASON, which_norm_hardly_matters
from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, SEARCH_OF_BOTH

from maclaurin import catalogue
from maclaurin.study import Alike, Experiment, Study, cells_of

#: rows of the paper's code, and the baseline it calls softmax
ROWS = [entry for entry in catalogue if entry.aliases or entry.name in ("softmax", "norm")]

study = Study(
    name="parts",
    title="Every ablation of the paper's code",
    question=(
        "The paper's public code names 38 variants; those of equal formulas are one row here. Trained alike, "
        "which parts of softmax attention matter?"
    ),
    budget="about 90 minutes on 2 CPU cores with the search for learning rates; shares runs with gap",
    experiments=(
        Experiment(
            name="language",
            title=f"{PICO_TEXT_TITLE}, equal start",
            metric="loss",
            common={**PICO_TEXT, "equal_start": True},
            cells=cells_of({entry.name: entry.name for entry in ROWS}),
            seeds=(0, 1, 2),
            baseline="softmax",
            tune=SEARCH_OF_BOTH,
        ),
    ),
    claims=(
        which_norm_hardly_matters("language", "softmax", "norm", "clamped-rms", "length-layer"),
        Alike(
            says="A gate before a norm does nothing: it divides out.",
            note="equal by algebra",
            experiment="language",
            cells=("norm", "norm-gated-before"),
            within=MARGIN,
            because=MARGIN_REASON,
        ),
    ),
)
