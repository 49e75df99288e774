"""What a benchmark found, as data, and its JSON file. The one place that knows the fields; needs no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.bench.size import Size
from maclaurin.errors import InputError

SCHEMA = 1

#: measured: it was right, so it was timed; wrong: it was not; failed: it did not run
Status = Literal["measured", "wrong", "failed"]


@final
@dataclass(frozen=True)
class Figures:
    """What one program took for one call; None stands for what was not measured, and `note` says why."""

    name: str
    #: largest relative error against float64, and of which tensor; None where there is nothing to check
    error: float | None = None
    worst: str = ""
    first_call_s: float | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    #: half the distance between the quartiles over the median, for forward and backward
    spread: float | None = None
    samples: int = 0
    #: beyond inputs and outputs, forward and backward
    peak_bytes: int | None = None
    #: of a step replayed as a CUDA graph
    graph_ms: float | None = None
    note: str = ""


@final
@dataclass(frozen=True)
class Verdict:
    """A measured value beside the limit it is held to; `reached` is None where the two cannot be compared."""

    target: str
    value: float | None
    limit: float
    reached: bool | None
    note: str = ""


@final
@dataclass(frozen=True)
class CaseRecord:
    """One case: what ran, how right it was, what it took, what its peers took."""

    name: str
    group: str
    in_sweep: bool
    spec: str
    asked_form: str
    size: Size
    dtype: str
    status: Status
    own: Figures
    form: str = ""
    backend: str = ""
    peers: dict[str, Figures] = dataclasses.field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    #: operations a pass must do and bytes it must move at least, forward
    flops: float | None = None
    moved_bytes: float | None = None
    #: bytes of state read and written by one step, and its rate over that of a device copy in the same run
    state_traffic: int | None = None
    share_of_copy: float | None = None
    date: str = ""
    seconds: float = 0.0

    @property
    def reached(self) -> bool | None:
        """Whether every target is; None where nothing is missed but something could not be compared."""
        found = [verdict.reached for verdict in self.verdicts]
        if not found:
            return None
        return False if False in found else None if None in found else True


@final
@dataclass(frozen=True)
class Roofs:
    """What the machine can do at most, measured in the same run."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    matmul_dtype: str


@final
@dataclass(frozen=True)
class BenchRecord:
    """A whole benchmark as it stands; also half-way through."""

    made: dict[str, Any]
    device: str
    full_shapes: bool
    roofs: Roofs | None = None
    cases: tuple[CaseRecord, ...] = ()
    left_out: tuple[str, ...] = ()

    def case_named(self, name: str) -> CaseRecord | None:
        """The record of one case, if there is one."""
        return next((case for case in self.cases if case.name == name), None)

    def with_case(self, case: CaseRecord) -> BenchRecord:
        """The same with one case added, in place of an older record of it."""
        kept = tuple(known for known in self.cases if known.name != case.name)
        return dataclasses.replace(self, cases=(*kept, case))

    def is_of(self, other: BenchRecord) -> bool:
        """Whether both come from one machine, code and choice of shapes, so that cases may stand together."""
        return (self.device, self.full_shapes) == (other.device, other.full_shapes) and _identity(
            self.made
        ) == _identity(other.made)


def _identity(made: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in made.items() if key != "date"}


# ------------------------------------------------------------------------------------------- files


def write_bench(record: BenchRecord, path: Path) -> None:
    """Whole or not at all."""
    data = {"schema": SCHEMA, **dataclasses.asdict(record)}
    for plain, case in zip(data["cases"], record.cases, strict=True):
        plain["reached"] = case.reached
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(_finite(data), file, indent=1, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_bench(path: Path) -> BenchRecord:
    """What write_bench wrote."""
    if not path.is_file():
        raise InputError(f"there is no benchmark at {path}: make one with maclaurin bench --out {path}.")
    try:
        data = json.loads(path.read_text("utf-8"))
        schema = data.pop("schema")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise InputError(f"{path} is not a benchmark of maclaurin.") from None
    if schema != SCHEMA:
        raise InputError(f"{path} has schema {schema}, and this version of maclaurin reads schema {SCHEMA}.")
    try:
        return _bench(data)
    except (TypeError, KeyError, AttributeError) as problem:
        raise InputError(f"{path} is not a whole benchmark: {problem}.") from None


def _bench(data: dict[str, Any]) -> BenchRecord:
    roofs = data["roofs"]
    return BenchRecord(
        **{
            **data,
            "roofs": None if roofs is None else Roofs(**roofs),
            "cases": tuple(_case(each) for each in data["cases"]),
            "left_out": tuple(data["left_out"]),
        }
    )


def _case(data: dict[str, Any]) -> CaseRecord:
    plain = {key: value for key, value in data.items() if key != "reached"}  # follows from the verdicts
    return CaseRecord(
        **{
            **plain,
            "size": Size(**data["size"]),
            "own": Figures(**data["own"]),
            "peers": {key: Figures(**each) for key, each in data["peers"].items()},
            "verdicts": tuple(Verdict(**each) for each in data["verdicts"]),
        }
    )


def _finite(value: Any) -> Any:
    """Numbers that are none as null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
