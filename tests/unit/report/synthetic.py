"""Studies made up from formulas, in the schema of real ones."""

from __future__ import annotations

import hashlib
import math
import random

from maclaurin.study.claim import Behind, Ordered, Tied
from maclaurin.study.record import ExperimentRecord, FormsRecord, RunRecord, StudyRecord

#: cell → (notation, order, bytes of state, final loss)
PARTS = {
    "softmax": ("exp/sum", None, None, 2.225),
    "rms": ("exp/rms", None, None, 2.229),
    "l2": ("exp/l2", None, None, 2.243),
    "gate": ("exp(clamp=5)/len*out", None, None, 2.843),
    "1/t": ("exp(clamp=5)/len", None, None, 2.83),
    "elu": ("linear(elu1)/sum", 1, 99_840, 2.741),
    "relu": ("linear(relu)/sum", 1, 99_840, 2.768),
    "cosine": ("linear(cosine)/l2", 1, 99_840, 2.792),
    "taylor 1": ("taylor(1)/l2", 1, 101_376, 2.715),
    "taylor 2": ("taylor(2)/sum", 2, 912_384, 2.455),
    "taylor 4": ("taylor(4)/sum", 4, 31_000_000, 2.291),
    "taylor 8": ("taylor(8)/sum", 8, 4_100_000_000, 2.236),
}
RECALL = {
    "softmax": ("exp/sum", None, None, 0.994),
    "taylor 1": ("taylor(1)/l2", 1, 101_376, 0.213),
    "taylor 2": ("taylor(2)/l2", 2, 912_384, 0.641),
    "taylor 3": ("taylor(3)/l2", 3, 6_100_000, 0.912),
}
PROVENANCE = {
    "commit": "eeb819b",
    "code": "5f3c9a7d1b2e4c6f8a90b1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6f7a8b9c0d1e2",
    "data": {
        "name": "stdlib",
        "fingerprint": "9c1185a5c5e9fc54612808977ee8f548b2258d31aa2f1a4c7d6d1b0f6c3f2a10",
    },
    "machine": {"platform": "Linux x86_64", "gpu": None, "threads": 2},
    "versions": {"maclaurin": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "date": "2025-09-01T10:00:00Z",
}


def run(experiment, cell, seed, value, *, metric="test_loss", status="finished", attention="exp/sum", **more):
    """One run; its curves end where its metric does."""
    steps = more.pop("steps", 400)
    last = more.pop("step", steps)
    values = {"test_loss": value, "accuracy": None if value is None else math.exp(-value)}
    if metric == "accuracy":
        values = {"test_loss": None if value is None else 3.2 * (1 - value) + 0.02, "accuracy": value}
    facts = {
        "levels": {},
        "order": None,
        "state_bytes": None,
        "message": None,
        "parameters": 1_184_256,
        "tokens_per_second": 11_250.0,
        "seconds": 41.5,
        "config": {"seed": seed},
        "provenance": PROVENANCE,
    }
    return RunRecord(
        key=hashlib.sha256(f"{experiment} {cell} {seed}".encode()).hexdigest(),
        experiment=experiment,
        cell=cell,
        seed=seed,
        attention=(attention,),
        status=status,
        steps=steps,
        step=last,
        **{**facts, **values, **more},
    )


def experiment(values, *, name="lm", metric="test_loss", baseline=None, axes=(), levels=None, statuses=None):
    """An experiment and its runs from cell → values by seed; None is a run that is not there."""
    cells = tuple(values)
    seeds = tuple(range(max(len(row) for row in values.values())))
    record = ExperimentRecord(
        name=name,
        title=name,
        metric=metric,
        baseline=baseline or cells[0],
        cells=cells,
        seeds=seeds,
        axes=axes,
    )
    runs = []
    for cell, row in values.items():
        for seed, value in enumerate(row):
            status = (statuses or {}).get((cell, seed), "waiting" if value is None else "finished")
            place = (levels or {}).get(cell, {})
            runs.append(run(name, cell, seed, value, metric=metric, status=status, levels=place))
    return record, tuple(runs)


def study(*experiments, claims=(), forms=None, name="mini"):
    """A study of experiments as `experiment` makes them."""
    return StudyRecord(
        name=name,
        title="Which parts of softmax matter",
        question="What is lost when a part is replaced?",
        budget="8 minutes on 2 cores",
        scale=1.0,
        experiments=tuple(record for record, _ in experiments),
        claims=tuple(claims),
        runs=tuple(run for _, runs in experiments for run in runs),
        forms=forms,
    )


def curve(rng, start, end, steps, points, spread=0.02):
    """Points from start to end, falling like 1/step."""
    found = []
    for i in range(1, points + 1):
        step = round(steps * i / points)
        rest = math.exp(-5.5 * i / points) * (start - end)
        wobble = 0 if i == points else rng.gauss(0, spread * (0.3 + math.exp(-4 * i / points)))
        found.append((step, end + rest + wobble))
    return tuple(found)


def realistic(seeds=3):
    """Language modelling, recall and a factorial, with one divergence, one crash and one run to come."""
    rng = random.Random(0)
    lm = _listed(rng, "lm", "Language modelling on stdlib", "test_loss", PARTS, seeds)
    recall = _listed(rng, "recall", "Recall of 8 pairs", "accuracy", RECALL, seeds)
    return study(lm, recall, _factorial(rng, seeds), claims=CLAIMS, forms=FORMS)


def _listed(rng, name, title, metric, table, seeds):
    shifts = [rng.gauss(0, 0.02) for _ in range(seeds)]
    runs = []
    for cell, (notation, order, size, value) in table.items():
        for seed in range(seeds):
            noise = 0.006 if metric == "test_loss" else 0.012
            end = value + shifts[seed] * (1 if metric == "test_loss" else 0.2) + rng.gauss(0, noise)
            end = min(end, 0.999) if metric == "accuracy" else end
            facts = {"attention": notation, "order": order, "state_bytes": size, "metric": metric}
            facts |= {"tokens_per_second": rng.uniform(6e3, 14e3), "seconds": rng.uniform(30, 55)}
            if cell == "gate" and seed == 1:
                broken = curve(rng, 6.2, 3.1, 400, 20)[:9]
                told = "loss is nan after a gradient of size 4e+07"
                facts |= {"status": "diverged", "step": 184, "message": told, "train_curve": broken}
                runs.append(run(name, cell, seed, None, **facts))
                continue
            if cell == "cosine" and seed == 2:
                runs.append(run(name, cell, seed, None, status="crashed", message="out of memory", **facts))
                continue
            runs.append(run(name, cell, seed, end, **facts, **_curves(rng, end, metric)))
    record = ExperimentRecord(
        name=name,
        title=title,
        metric=metric,
        baseline="softmax",
        cells=tuple(table),
        seeds=tuple(range(seeds)),
    )
    return record, tuple(runs)


def _curves(rng, end, metric):
    test_loss = 3.2 * (1 - end) + 0.02 if metric == "accuracy" else end
    losses = curve(rng, 5.5, test_loss, 400, 10, 0.01)
    accuracies = curve(rng, 0.02, end, 400, 10, 0.01) if metric == "accuracy" else None
    test = tuple((s, x, accuracies[i][1] if accuracies else 0.4) for i, (s, x) in enumerate(losses))
    positions = tuple((8 * i, test_loss + 1.6 / (1 + i) + rng.gauss(0, 0.01)) for i in range(32))
    return {
        "test_curve": test,
        "train_curve": curve(rng, 6.2, test_loss - 0.05, 400, 80, 0.03),
        "loss_by_position": positions if metric == "test_loss" else (),
    }


def _factorial(rng, seeds):
    kernels = {"exp": ("exp", 0.0), "taylor 4": ("taylor(4)", 0.05), "taylor 2": ("taylor(2)", 0.21)}
    norms = {"sum": ("/sum", 0.0), "l2": ("/l2", 0.015), "rms": ("/rms", 0.004), "1/t": ("/len", 0.33)}
    gates = {"none": ("", 0.0), "out": ("*out", -0.004)}
    values, runs, shifts = {}, [], [rng.gauss(0, 0.02) for _ in range(seeds)]
    for k, (kernel, a) in kernels.items():
        for n, (norm, b) in norms.items():
            for g, (gate, c) in gates.items():
                if (k, n, g) == ("taylor 4", "rms", "out"):
                    continue
                twist = 0.16 if n == "1/t" and k == "exp" else 0.0
                notation = f"{kernel}{norm}{gate}" if norm in ("/sum", "/len") else f"{kernel}{gate}{norm}"
                values[f"{k} {n} {g}"] = (
                    notation,
                    {"kernel": k, "norm": n, "gate": g},
                    2.25 + a + b + c + twist,
                )
    for cell, (notation, levels, value) in values.items():
        for seed in range(seeds):
            end = value + shifts[seed] + rng.gauss(0, 0.007)
            waiting = cell == "taylor 2 1/t out" and seed == seeds - 1
            facts = {"status": "waiting", "step": 0} if waiting else _curves(rng, end, "test_loss")
            if not waiting:
                facts["loss_by_position"] = ()
            runs.append(
                run(
                    "interactions",
                    cell,
                    seed,
                    None if waiting else end,
                    attention=notation,
                    levels=levels,
                    **facts,
                )
            )
    record = ExperimentRecord(
        name="interactions",
        title="Kernel, norm and gate together",
        metric="test_loss",
        baseline="exp sum none",
        cells=tuple(values),
        seeds=tuple(range(seeds)),
        axes=("kernel", "norm", "gate"),
    )
    return record, tuple(runs)


PAPER = "arXiv 2507.23632"
CLAIMS = (
    Tied(
        says="A norm does the work of the denominator.",
        source=f"{PAPER}, figure 3",
        paper="ln of test loss at 90k steps: softmax 0.945, norm 0.945",
        experiment="lm",
        cells=("softmax", "rms", "l2"),
        within=0.03,
    ),
    Behind(
        says="A gate does not.",
        source=f"{PAPER}, figure 3",
        paper="softmax 0.945, gate 0.962",
        experiment="lm",
        cells=("softmax", "gate", "1/t"),
    ),
    Behind(
        says="Linear attention is behind softmax.",
        source=f"{PAPER}, figure 1",
        paper="elu, relu and cosine clearly behind on three data sets",
        experiment="lm",
        cells=("softmax", "elu", "relu", "cosine"),
    ),
    Ordered(
        says="More orders come closer to softmax.",
        source=f"{PAPER}, figure 5",
        paper="order 2 ≈ 1.345, 4 ≈ 1.245, 10 ≈ softmax ≈ 1.20",
        experiment="lm",
        cells=("taylor 1", "taylor 2", "taylor 4", "taylor 8", "softmax"),
    ),
    Tied(
        says="Linear maps are all alike.",
        source=f"{PAPER}, figure 1",
        paper="within 0.005 of each other",
        experiment="lm",
        cells=("elu", "relu", "taylor 1"),
        within=0.005,
    ),
    Behind(
        says="L2 is behind RMS at short budgets.",
        source="our own runs",
        paper="not measured",
        experiment="lm",
        cells=("softmax", "rms"),
    ),
    Ordered(
        says="Orders buy recall.",
        source=PAPER,
        paper="not measured",
        experiment="recall",
        cells=("taylor 1", "taylor 2", "taylor 3", "softmax"),
    ),
    Ordered(
        says="At 4,096 tokens the picture is the same.",
        source=f"{PAPER}, figure 4",
        paper="softmax 1.151, norm 1.153, gate 1.170",
        experiment="long",
        cells=("gate", "softmax"),
    ),
)
FORMS = FormsRecord(
    agreement=tuple(
        {"spec": spec, "form": form, "error": error * scale}
        for spec, error in (
            ("exp/sum", 4e-16),
            ("exp/l2", 6e-16),
            ("taylor(2)/sum", 1.1e-15),
            ("taylor(4)/l2", 2.3e-15),
        )
        for form, scale in (("chunked", 1.0), ("recurrent", 1.7))
    ),
    series=tuple(
        {"order": n, "error": max(0.62 * 2.1**n / math.factorial(n), 3e-16)} for n in range(0, 25, 2)
    ),
)
