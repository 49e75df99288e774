"""How do the parts interact? A full factorial over kernel, normaliser and gates."""

from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, RATES

from maclaurin.study import Experiment, Study, grid

AXES = {
    "kernel": {"exp": "exp", "order 4": "taylor(4)", "order 2": "taylor(2)", "linear elu": "linear(elu1)"},
    "normaliser": {"row sum": "/sum", "1/t": "/len", "L2": "/l2", "RMS": "/rms"},
    "gates": {"no gate": "", "in": "*in", "out": "*out", "in and out": "*in*out"},
}


def notation(pieces: dict[str, str]) -> str:
    """The input gate acts on the values, the output gate last: before a norm it would divide out."""
    before = "*in" if "*in" in pieces["gates"] else ""
    after = "*out" if "*out" in pieces["gates"] else ""
    return f"{pieces['kernel']}{before}{pieces['normaliser']}{after}"


study = Study(
    name="interactions",
    title="How the parts of attention interact",
    question=(
        "Kernel, normaliser and gates in all 64 combinations: how much of the loss does each explain, and "
        "where does the effect of one depend on another?"
    ),
    budget="about 100 minutes on 2 CPU cores with the search for learning rates (estimated)",
    experiments=(
        Experiment(
            name="language",
            title=PICO_TEXT_TITLE,
            metric="loss",
            common=PICO_TEXT,
            cells=grid(AXES, notation),
            seeds=(0, 1, 2),
            baseline="exp row sum no gate",
            tune=RATES,
            axes=tuple(AXES),
        ),
    ),
)
