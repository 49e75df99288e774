"""Which parts of softmax attention matter? The paper's questions in minutes on two cores.

0.16M-parameter models: enough for the gaps between the variants to show, far from enough for good text.
"""

from maclaurin.study import Behind, Experiment, Ordered, Study, Tied, cells_of

PAPER = "arXiv 2507.23632"

LANGUAGE = Experiment(
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
    cells=cells_of(
        {
            "softmax": "exp/sum",
            "norm l2": "exp/l2",
            "norm rms": "exp/rms",
            "gate": "exp/len*out",
            "1/t": "exp/len",
            "linear elu": "linear-elu",
            "linear relu": "linear-relu",
            "linear cosine": "linear-cosine",
            "order 1": "taylor(1)/l2",
            "order 2": "taylor(2)/sum",
            "order 4": "taylor(4)/sum",
            "order 8": "taylor(8)/sum",
        }
    ),
    seeds=(0, 1),
    baseline="softmax",
)

RECALL = Experiment(
    name="recall",
    title="Recall of 4 key-value pairs asked 12 times, 200 steps of training",
    metric="accuracy",
    common={
        "size": "pico",
        "data": "mqar:pairs=4,vocab=32,queries=12,length=40",
        "initialization": "torch",
        "steps": 200,
        "batch_size": 64,
        "lr": 4e-3,
        "eval_every": 50,
        "eval_rows": 128,
        "checkpoint_every": 0,
    },
    cells=cells_of(
        {
            "softmax": "exp/sum",
            "norm l2": "exp/l2",
            "linear elu": "linear-elu",
            "order 1": "taylor(1)/l2",
            "order 2": "taylor(2)/sum",
            "order 4": "taylor(4)/sum",
        }
    ),
    seeds=(0, 1, 2),
    baseline="softmax",
)

study = Study(
    name="mini",
    title="Which parts of softmax attention matter?",
    question=(
        "Softmax attention is a sum of RNNs, one per power of the score, under a denominator. Which orders "
        "does it need, can a norm or a gate stand in for the denominator, and how far behind is its first "
        "order, linear attention?"
    ),
    budget="5 to 8 minutes on 2 CPU cores",
    experiments=(LANGUAGE, RECALL),
    claims=(
        Tied(
            says="The denominator can be a vector norm: softmax and the L2 norm perform alike.",
            source=f"{PAPER}, 300M on the Pile at 90k steps",
            paper="ln CE: softmax ≈ 0.945, norm ≈ 0.945",
            experiment="language",
            cells=("softmax", "norm l2"),
            within=0.05,
        ),
        Tied(
            says="Which norm hardly matters: L2 and RMS perform alike.",
            source=f"{PAPER}, ablation of the parts",
            paper="row sum, L2, RMS and Layer close together",
            experiment="language",
            cells=("norm l2", "norm rms"),
            within=0.05,
        ),
        Behind(
            says="A gate (or 1/t alone) cannot stand in for the denominator as well.",
            source=f"{PAPER}, 300M on the Pile at 90k steps",
            paper="ln CE: softmax ≈ 0.945, gate ≈ 0.962",
            experiment="language",
            cells=("softmax", "gate", "1/t"),
        ),
        Behind(
            says="Linear attention, whatever its feature map, is clearly behind softmax.",
            source=f"{PAPER}, all three data sets",
            paper="elu, relu and cosine clearly behind softmax",
            experiment="language",
            cells=("softmax", "linear elu", "linear relu", "linear cosine"),
        ),
        Ordered(
            says="Each further order of the series brings the loss closer to softmax.",
            source=f"{PAPER}, Taylor orders near 30k steps",
            paper="training ln CE: order 2 ≈ 1.345, 4 ≈ 1.245, 8 slightly above, softmax ≈ 1.20",
            experiment="language",
            cells=("order 1", "order 2", "order 4", "order 8", "softmax"),
        ),
        Behind(
            says="Recall needs the higher orders: first-order attention is behind softmax.",
            source="Arora et al. 2023, arXiv 2312.04927",
            paper="attention solves recall that linear attention of the same width does not",
            experiment="recall",
            cells=("softmax", "order 1", "linear elu"),
        ),
        Ordered(
            says="More orders recall more.",
            source="this project",
            paper="no number published",
            experiment="recall",
            cells=("order 1", "order 2", "order 4", "softmax"),
        ),
    ),
)
