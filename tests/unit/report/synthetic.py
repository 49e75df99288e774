"""Studies made up from formulas, in the schema of real ones."""

from __future__ import annotations

import dataclasses
import math
import random

from maclaurin.study import Alike, Behind, Ordered, Published
from maclaurin.study.run_record import (
    CellRecord,
    CellTuning,
    ExperimentRecord,
    FormsRecord,
    Label,
    Run,
    RunRecord,
    StudyRecord,
    Trial,
    Tuning,
)

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
    "data": "stdlib",
    "machine": {"platform": "Linux x86_64", "gpu": None, "threads": 2},
    "versions": {"maclaurin": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "date": "2025-09-01T10:00:00Z",
}


def run(experiment, cell, seed, value, *, metric="loss", status="finished", attention="exp/sum", **more):
    """(label, record) of one run; its curves end where its metric does."""
    steps = more.pop("steps", 400)
    metrics = {} if value is None else {metric: value}
    if metric == "accuracy" and value is not None:
        metrics["loss"] = 3.2 * (1 - value) + 0.02
    if status == "finished":
        metrics |= {"parameters": 1_184_256.0, "tokens_per_second": 11_250.0, "training_flops": 3.1e12}
    config = {
        "attention": [attention], "seed": seed, "steps": steps, "batch_size": 16, "length": 128, "lr": 1e-3,
        "data": f"{experiment} data", "size": "nano", "note": cell,
    }  # fmt: skip
    facts = {"step": steps, "seconds": 41.5, "provenance": PROVENANCE, "metrics": metrics}
    facts["metrics"] = {**metrics, **more.pop("metrics", {})}
    made = RunRecord(
        run=Run(config=config, data="9c1185a5c5e9", torch="2.13", numerics=1),
        status=status,
        **{**facts, **more},
    )
    return Label(experiment, cell, seed), made


def experiment_record(name, title, metric, baseline, runs, *, axes=(), levels=None, seeds=None, tuning=None):
    """An experiment from its labelled runs."""
    cells = {}
    for label, record in runs:
        cells.setdefault(label.cell, {})[label.seed] = record.key
    return ExperimentRecord(
        name=name,
        title=title,
        metric=metric,
        metric_title={"loss": "test loss"}.get(metric, metric),
        higher_is_better=metric == "accuracy",
        scale="logit" if metric == "accuracy" else "linear",
        baseline=baseline,
        seeds=seeds or tuple(sorted({label.seed for label, _ in runs})),
        cells=tuple(CellRecord(name=c, runs=r, levels=(levels or {}).get(c, {})) for c, r in cells.items()),
        axes=axes,
        tuning=tuning,
    )


def experiment(
    values, *, name="lm", metric="loss", baseline=None, axes=(), levels=None, statuses=None, scale=None
):
    """An experiment and its runs from cell → values by seed; None is a run that waits."""
    runs = []
    for cell, row in values.items():
        for seed, value in enumerate(row):
            status = (statuses or {}).get((cell, seed), "waiting" if value is None else "finished")
            runs.append(run(name, cell, seed, value, metric=metric, status=status))
    record = experiment_record(
        name, name, metric, baseline or next(iter(values)), runs, axes=axes, levels=levels
    )
    if scale is not None:
        record = dataclasses.replace(record, scale=scale)
    return record, tuple(runs)


def study(*experiments, claims=(), forms=None, name="mini"):
    """A study of experiments as `experiment` makes them."""
    return StudyRecord(
        name=name,
        title="Which parts of softmax matter",
        question="What is lost when a part is replaced?",
        budget="8 minutes on 2 cores",
        source="",
        scale=1.0,
        experiments=tuple(record for record, _ in experiments),
        claims=tuple(claims),
        runs={record.key: record for _, runs in experiments for _, record in runs},
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
    lm = _listed(rng, "lm", "Language modelling on stdlib", "loss", PARTS, seeds, tuning=TUNING)
    recall = _listed(rng, "recall", "Recall of 8 pairs", "accuracy", RECALL, seeds)
    return study(lm, recall, _factorial(rng, seeds), claims=CLAIMS, forms=FORMS)


def _listed(rng, name, title, metric, table, seeds, tuning=None):
    shifts = [rng.gauss(0, 0.02) for _ in range(seeds)]
    runs = []
    for cell, (notation, order, size, value) in table.items():
        for seed in range(seeds):
            noise = 0.003 if metric == "loss" else 0.012
            end = value + shifts[seed] * (1 if metric == "loss" else 0.2) + rng.gauss(0, noise)
            end = min(end, 0.999) if metric == "accuracy" else end
            facts = {"attention": notation, "order": order, "state_bytes": size, "metric": metric}
            facts |= {"seconds": rng.uniform(30, 55)}
            if cell == "gate" and seed == 1:
                broken = curve(rng, 6.2, 3.1, 400, 20)[:9]
                words = "loss is nan after a gradient of size 4e+07"
                facts |= {
                    "status": "diverged",
                    "step": 184,
                    "message": words,
                    "curves": {"train_loss": broken},
                }
                runs.append(run(name, cell, seed, None, **facts))
                continue
            if cell == "cosine" and seed == 2:
                runs.append(run(name, cell, seed, None, status="crashed", message="out of memory", **facts))
                continue
            runs.append(run(name, cell, seed, end, **facts, **_curves(rng, end, metric)))
    return experiment_record(name, title, metric, "softmax", runs, tuning=tuning), tuple(runs)


def _curves(rng, end, metric):
    loss = 3.2 * (1 - end) + 0.02 if metric == "accuracy" else end
    curves = {
        "validation_loss": curve(rng, 5.5, loss, 400, 10, 0.01),
        "train_loss": curve(rng, 6.2, loss - 0.05, 400, 80, 0.03),
    }
    if metric == "accuracy":
        curves["validation_accuracy"] = curve(rng, 0.02, end, 400, 10, 0.01)
    # nothing is scored at every fourth stretch
    positions = tuple(
        (8 * i, None if i % 4 == 0 else loss + 1.6 / (1 + i) + rng.gauss(0, 0.01)) for i in range(32)
    )
    flops = {"training_flops": 3.1e12 * (1 + 0.1 * rng.random())}
    return {"curves": curves, "loss_by_position": positions if metric == "loss" else (), "metrics": flops}


def _factorial(rng, seeds):
    kernels = {"exp": ("exp", 0.0), "taylor 4": ("taylor(4)", 0.05), "taylor 2": ("taylor(2)", 0.21)}
    norms = {"sum": ("/sum", 0.0), "l2": ("/l2", 0.015), "rms": ("/rms", 0.004), "1/t": ("/len", 0.33)}
    gates = {"none": ("", 0.0), "out": ("*out", -0.004)}
    values, runs, levels_of, shifts = {}, [], {}, [rng.gauss(0, 0.02) for _ in range(seeds)]
    for k, (kernel, a) in kernels.items():
        for n, (norm, b) in norms.items():
            for g, (gate, c) in gates.items():
                if (k, n, g) == ("taylor 4", "rms", "out"):
                    continue
                contrast = 0.16 if n == "1/t" and k == "exp" else 0.0
                notation = f"{kernel}{norm}{gate}" if norm in ("/sum", "/len") else f"{kernel}{gate}{norm}"
                values[f"{k} {n} {g}"] = (
                    notation,
                    {"kernel": k, "norm": n, "gate": g},
                    2.25 + a + b + c + contrast,
                )
    for cell, (notation, levels, value) in values.items():
        levels_of[cell] = levels
        for seed in range(seeds):
            end = value + shifts[seed] + rng.gauss(0, 0.007)
            waiting = cell == "taylor 2 1/t out" and seed == seeds - 1
            facts = {"status": "waiting", "step": 0} if waiting else _curves(rng, end, "loss")
            if not waiting:
                facts["loss_by_position"] = ()
            value_ = None if waiting else end
            runs.append(run("interactions", cell, seed, value_, attention=notation, **facts))
    record = experiment_record(
        "interactions",
        "Kernel, norm and gate together",
        "loss",
        "exp sum none",
        runs,
        axes=("kernel", "norm", "gate"),
        levels=levels_of,
    )
    return record, tuple(runs)


def _tuned(best, *rates):
    trials = tuple(
        Trial(
            rate=rate, seed=1000, value=None if rate > 0.1 else 2.5 + 0.1 * math.log2(rate / best) ** 2,
            status="diverged" if rate > 0.1 else "finished", key=f"{rate}", seconds=30.0, tokens=819_200,
        )
        for rate in rates
    )  # fmt: skip
    return CellTuning(rate=best, trials=trials, subject="x")


TUNING = Tuning(
    metric="validation_loss",
    source="studies/mini/tuned.json",
    cells={
        "softmax": _tuned(4e-3, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3),
        "l2": _tuned(8e-3, 2e-3, 4e-3, 8e-3, 16e-3, 0.2),
    },
)


PAPER = "arXiv 2507.23632"
CLAIMS = (
    Alike(
        says="A norm does the work of the denominator.",
        source=f"{PAPER}, figure 3",
        published=(Published(where="90k steps", unit="ln CE", values={"softmax": 0.945, "norm": 0.945}),),
        experiment="lm",
        cells=("softmax", "rms", "l2"),
        within=0.05,
        because="nobody would notice",
    ),
    Behind(
        says="A gate does not.",
        source=f"{PAPER}, figure 3",
        note="softmax 0.945, gate 0.962",
        experiment="lm",
        cells=("softmax", "gate", "1/t"),
    ),
    Behind(
        says="Linear attention is behind softmax.",
        source=f"{PAPER}, figure 1",
        note="elu, relu and cosine clearly behind on three data sets",
        experiment="lm",
        cells=("softmax", "elu", "relu", "cosine"),
    ),
    Ordered(
        says="More orders come closer to softmax.",
        source=f"{PAPER}, figure 5",
        note="order 2 ≈ 1.345, 4 ≈ 1.245, 10 ≈ softmax ≈ 1.20",
        experiment="lm",
        cells=("taylor 1", "taylor 2", "taylor 4", "taylor 8", "softmax"),
    ),
    Alike(
        says="Linear maps are all alike.",
        source=f"{PAPER}, figure 1",
        note="within 0.005 of each other",
        experiment="lm",
        cells=("elu", "relu", "taylor 1"),
        within=0.005,
        because="as published",
    ),
    Behind(says="RMS is behind softmax.", experiment="lm", cells=("softmax", "rms")),
    Ordered(
        says="Orders buy recall.",
        experiment="recall",
        cells=("taylor 1", "taylor 2", "taylor 3", "softmax"),
    ),
    Ordered(
        says="At 4,096 tokens the picture is the same.",
        source=f"{PAPER}, figure 4",
        note="softmax 1.151, norm 1.153, gate 1.170",
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
