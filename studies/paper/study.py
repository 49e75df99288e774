"""The paper's own settings, for a cluster: arXiv 2507.23632, 275M and 2.08B parameters."""

from paper_claims import (
    LINEAR,
    gate_does_not_stand_in,
    linear_is_behind,
    norm_stands_in,
    orders_approach_softmax,
)

from maclaurin.study import Experiment, Study, cells_of
from maclaurin.training.config import PRESETS

COMMON = {**PRESETS["paper"], "tokenizer": "bpe:32000", "eval_every": 10_000, "checkpoint_every": 5_000}
#: the paper clips gradients of gated models only
GATED = {"clip": 1.0}


def main_cells():
    """Softmax, norm and gate."""
    return (*cells_of({"softmax": "exp/sum", "norm": "exp/l2"}), *cells_of({"gate": "gate"}, **GATED))


def experiment(name: str, title: str, cells, **settings) -> Experiment:
    """One comparison at the paper's optimiser settings."""
    return Experiment(
        name=name,
        title=title,
        metric="loss",
        common={**COMMON, **settings},
        cells=cells,
        seeds=(0, 1, 2),
        baseline="softmax",
    )


DATA = {"pile": "pile", "slimpajama": "slimpajama", "fineweb": "fineweb"}

study = Study(
    name="paper",
    title="The paper's own settings",
    question=(
        "Softmax, norm, gate and linear attention at 275M and 2.08B parameters, lengths 1024 and 4096, on "
        "the Pile, SlimPajama and FineWeb; Taylor orders 2 to 10."
    ),
    budget="a cluster: see --dry-run",
    experiments=(
        *(
            experiment(
                f"small-{name}",
                f"275M on {name}",
                (*main_cells(), *cells_of(LINEAR)),
                size="small",
                data=data,
            )
            for name, data in DATA.items()
        ),
        experiment(
            "large-fineweb",
            "2.08B on fineweb, 60k steps",
            main_cells(),
            size="large",
            data="fineweb",
            steps=60_000,
        ),
        experiment(
            "long-fineweb",
            "275M on fineweb at length 4096, 20k steps",
            main_cells(),
            size="small",
            data="fineweb",
            length=4096,
            steps=20_000,
        ),
        experiment(
            "orders",
            "Taylor orders, 275M on fineweb, 30k steps",
            cells_of({"softmax": "exp/sum", **{f"order {n}": f"taylor({n})/sum" for n in (2, 4, 6, 8, 10)}}),
            size="small",
            data="fineweb",
            steps=30_000,
        ),
    ),
    claims=(
        norm_stands_in("small-pile", "norm"),
        norm_stands_in("large-fineweb", "norm"),
        *(gate_does_not_stand_in(name, "gate") for name in ("small-pile", "large-fineweb", "long-fineweb")),
        *(linear_is_behind(f"small-{name}") for name in DATA),
        orders_approach_softmax("orders", *(f"order {n}" for n in (2, 4, 6, 8, 10))),
    ),
)
