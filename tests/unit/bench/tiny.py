"""Cases of milliseconds, and records made up by hand."""

import torch

from maclaurin.bench.bench_record import BenchRecord, CaseRecord, Figures, Roofs, Size
from maclaurin.bench.setting import Setting
from maclaurin.bench.workloads import Case

SETTING = Setting(torch.device("cpu"), torch.float32, full_shapes=False, budget_ms=1.0)
ROOFS = Roofs(copy_bytes_per_s=1e10, matmul_flops_per_s=1e11, matmul_dtype="float32")
MADE = {"date": "2026-01-01", "commit": "abc", "gpu": None, "processor": "a processor", "torch": "2"}


def tiny_case(spec="exp/l2", tokens=24, **changes):
    return Case(group="tests", spec=spec, size=Size.of(2, 2, tokens, 8, 6), **changes)


def tiny_step(spec="taylor(2)/sum"):
    return Case(group="tests", spec=spec, size=Size.of(2, 2, 1, 8), kind="step")


def record_of(name="exp/sum B1 H8 T1024 D64", tokens=1024, **changes):
    known = {
        "group": "sweep",
        "in_sweep": True,
        "spec": "exp/sum",
        "asked_form": "auto",
        "size": Size.of(1, 8, tokens, 64),
        "dtype": "bfloat16",
        "status": "measured",
        "own": Figures("maclaurin", 1e-3, "output", 0.5, 1.0, 3.0, 0.01, 20, 10**6),
        "form": "parallel",
        "backend": "sdpa",
        "flops": 1e9,
        "moved_bytes": 1e6,
    }
    return CaseRecord(name=name, **{**known, **changes})


def bench_of(*cases, **changes):
    known = {"made": MADE, "device": "cpu", "full_shapes": True, "roofs": ROOFS, "cases": tuple(cases)}
    return BenchRecord(**{**known, **changes})
