"""The paper's questions at a budget of minutes per run on one H200: 13.8M parameters, 16M tokens a run.

python benchmarks/python_sources.py sources.jsonl --megabytes 80
maclaurin study paper-h200 --workers 8
"""

from maclaurin.study import Behind, Experiment, Ordered, Study, Tied, cells_of

PAPER = "arXiv 2507.23632"
ORDERS = (2, 4, 6, 8, 10)

study = Study(
    name="paper-h200",
    title="The paper's questions on one H200",
    question=(
        "Softmax, norms, gate, 1/t, linear attention and Taylor orders 1 to 10, three seeds each, at 13.8M "
        "parameters on 16M tokens of Python source: which of the paper's orderings show?"
    ),
    budget="about 12 minutes on one H200, eight runs at a time",
    experiments=(
        Experiment(
            name="language",
            title="Next token of Python source, 13.8M parameters, 16M tokens of training",
            metric="test_loss",
            common={
                "size": "mini",
                "data": "sources.jsonl",
                "tokenizer": "bpe:4096",
                "steps": 500,
                "batch_size": 64,
                "lr": 2e-3,
                "warmup": 50,
                "precision": "bf16",
                "eval_every": 125,
                "eval_rows": 256,
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
                    **{f"order {n}": f"taylor({n})/sum" for n in ORDERS},
                }
            ),
            seeds=(0, 1, 2),
            baseline="softmax",
        ),
    ),
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
            source=f"{PAPER}, 300M on the Pile at 90k steps; 2B on FineWeb at 60k",
            paper="ln CE: softmax ≈ 0.945, gate ≈ 0.962; softmax 0.960, gate 0.987",
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
            says="Each further pair of orders brings the loss closer to softmax.",
            source=f"{PAPER}, Taylor orders near 30k steps",
            paper="training ln CE: order 2 ≈ 1.345, 4 ≈ 1.245, 6, 8 slightly above, 10 ≈ softmax ≈ 1.20",
            experiment="language",
            cells=(*(f"order {n}" for n in ORDERS), "softmax"),
        ),
        Tied(
            says="Order 10 is as good as softmax.",
            source=f"{PAPER}, Taylor orders near 30k steps",
            paper="training ln CE: 10 ≈ softmax ≈ 1.20",
            experiment="language",
            cells=("softmax", "order 10"),
            within=0.05,
        ),
    ),
)
