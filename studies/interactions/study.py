"""How do the parts interact? A full factorial over kernel, denominator and gate, all at the same start."""

from shared_settings import PICO_TEXT, PICO_TEXT_TITLE, SEARCH_OF_BOTH

from maclaurin.study import Experiment, Study, grid

AXES = {
    "kernel": {"exp": "exp", "order 4": "taylor(4)", "order 2": "taylor(2)", "order 1": "taylor(1)"},
    "denominator": {"row sum": "/sum", "1/t": "/len", "L2 norm": "/l2"},
    "gate": {"no gate": "", "gate": "*out"},
}


def notation(pieces: dict[str, str]) -> str:
    """The notation of a cell; order 1 is about the mean under a row sum, which could vanish about zero."""
    text = "".join(pieces.values())
    return text.replace("taylor(1)/sum", "taylor(1,about=mean)/sum")


study = Study(
    name="interactions",
    title="How the parts of attention interact",
    question=(
        "Kernel, denominator or norm, and gate in all 24 combinations, each layer with softmax's output size "
        "at the start: how much of the loss does each explain, and where does the effect of one depend on "
        "another?"
    ),
    budget="about an hour on 2 CPU cores with the search for learning rates; few minutes after gap",
    experiments=(
        Experiment(
            name="language",
            title=f"{PICO_TEXT_TITLE}, equal start",
            metric="loss",
            common={**PICO_TEXT, "equal_start": True},
            cells=grid(AXES, notation),
            seeds=(0, 1, 2, 3, 4),
            baseline="exp row sum no gate",
            tune=SEARCH_OF_BOTH,
            axes=tuple(AXES),
        ),
    ),
)
