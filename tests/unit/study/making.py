"""What the tests of studies make up: small studies, runs and records."""

from maclaurin.study import Cell, Experiment, Study
from maclaurin.study.run_record import CellRecord, ExperimentRecord, Run, RunRecord, StudyRecord

CONFIG = {
    "attention": ["exp/sum"], "size": "nano", "seed": 0, "steps": 20, "batch_size": 2, "length": 8,
    "lr": 1e-3, "data": "stdlib", "keep": 2, "trackers": [], "checkpoint_every": 0, "log_every": 1,
    "device": "cpu", "precision": "fp32",
}  # fmt: skip


def make_run(**changes):
    facts = {"data": "d", "torch": "2.13", "numerics": 1, "parts": None}
    own = {name: changes.pop(name) for name in list(changes) if name in facts}
    return Run(config={**CONFIG, **changes}, **{**facts, **own})


def make_record(status="finished", *, metrics=None, seconds=None, step=0, message=None, **changes):
    return RunRecord(
        run=make_run(**changes),
        status=status,
        metrics=metrics or {},
        seconds=seconds,
        step=step,
        message=message,
    )


def make_study(cells=("softmax", "norm"), *, name="s", seeds=(0,), **more):
    attention = {"softmax": "exp/sum", "norm": "exp/l2", "second": "taylor(2)/sum"}
    made = tuple(Cell(cell, {"attention": (attention[cell],)}) for cell in cells)
    experiment = Experiment("text", "Text", "loss", {"device": "cpu"}, made, seeds, cells[0], **more)
    return Study(name, "S", "?", "none", (experiment,))


def study_record(records, *, name="s", metric="loss", source="", scale=1.0):
    """A study record from cell → seed → record."""
    cells = tuple(
        CellRecord(name=cell, runs={seed: record.key for seed, record in runs.items()})
        for cell, runs in records.items()
    )
    seeds = tuple(sorted({seed for runs in records.values() for seed in runs}))
    experiment = ExperimentRecord(
        name="e", title="E", metric=metric, metric_title=metric, higher_is_better=False, scale="linear",
        baseline=next(iter(records)), seeds=seeds, cells=cells,
    )  # fmt: skip
    return StudyRecord(
        name=name, title="t", question="q", budget="b", source=source, scale=scale, experiments=(experiment,),
        claims=(), runs={r.key: r for runs in records.values() for r in runs.values()},
    )  # fmt: skip
