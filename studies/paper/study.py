"""The paper's own settings, for a cluster: arXiv 2507.23632, 275M and 2.08B parameters."""

from maclaurin.study import Behind, Experiment, Ordered, Study, Tied, cells_of
from maclaurin.training.config import PRESETS

PAPER = "arXiv 2507.23632"
COMMON = {**PRESETS["paper"], "tokenizer": "bpe:32000", "eval_every": 10_000, "checkpoint_every": 5_000}
#: the paper clips gradients of gated models only
GATED = {"clip": 1.0}
LINEAR = {"linear elu": "linear-elu", "linear relu": "linear-relu", "linear cosine": "linear-cosine"}


def main_cells():
    """Softmax, norm and gate."""
    return (*cells_of({"softmax": "exp/sum", "norm": "exp/l2"}), *cells_of({"gate": "gate"}, **GATED))


def experiment(name: str, title: str, cells, **settings) -> Experiment:
    """One comparison at the paper's optimiser settings."""
    return Experiment(
        name=name,
        title=title,
        metric="test_loss",
        common={**COMMON, **settings},
        cells=cells,
        seeds=(0,),
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
        Tied(
            says="Softmax and norm perform alike at 275M.",
            source=f"{PAPER}, 300M on the Pile, test at 90k",
            paper="ln CE: softmax ≈ norm ≈ 0.945",
            experiment="small-pile",
            cells=("softmax", "norm"),
            within=0.02,
        ),
        Behind(
            says="The gate is behind softmax at 275M.",
            source=f"{PAPER}, 300M on the Pile, test at 90k",
            paper="ln CE: softmax ≈ 0.945, gate ≈ 0.962",
            experiment="small-pile",
            cells=("softmax", "gate"),
        ),
        Tied(
            says="Softmax and norm perform alike at 2B.",
            source=f"{PAPER}, 2B on FineWeb, test at 60k",
            paper="ln CE: softmax 0.960, norm 0.963",
            experiment="large-fineweb",
            cells=("softmax", "norm"),
            within=0.02,
        ),
        Behind(
            says="The gate is behind softmax at 2B.",
            source=f"{PAPER}, 2B on FineWeb, test at 60k",
            paper="ln CE: softmax 0.960, gate 0.987",
            experiment="large-fineweb",
            cells=("softmax", "gate"),
        ),
        Behind(
            says="The gate is behind softmax at length 4096.",
            source=f"{PAPER}, length 4096 on FineWeb at 20k",
            paper="ln CE: softmax 1.151, norm 1.153, gate 1.170",
            experiment="long-fineweb",
            cells=("softmax", "gate"),
        ),
        *(
            Behind(
                says=f"Linear attention is clearly behind softmax on {name}.",
                source=f"{PAPER}, all three data sets",
                paper="elu, relu and cosine clearly behind softmax",
                experiment=f"small-{name}",
                cells=("softmax", *LINEAR),
            )
            for name in DATA
        ),
        Ordered(
            says="Each further pair of orders brings the loss closer to softmax.",
            source=f"{PAPER}, Taylor orders near 30k steps",
            paper="training ln CE: order 2 ≈ 1.345, 4 ≈ 1.245, 6, 8 slightly above, 10 ≈ softmax ≈ 1.20",
            experiment="orders",
            cells=(*(f"order {n}" for n in (2, 4, 6, 8, 10)), "softmax"),
        ),
    ),
)
