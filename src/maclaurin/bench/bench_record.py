"""The results of a benchmark as data, and their JSON file. Needs no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from maclaurin.plain_data import finite, read_record, to_plain, write_json

SCHEMA = 1
#: divisor of the text length for small shapes
SMALL_IS_SHORTER_BY = 32
MOST_SMALL_ROWS = 2

#: measured: correct and timed; wrong: not timed; failed: it did not run
Status = Literal["measured", "wrong", "failed"]


@final
@dataclass(frozen=True)
class Size:
    """B sequences of T tokens, H heads with keys of size d and values of size e.

    There are `key_heads` heads of keys and values; 0 means as many as query heads.
    """

    batch: int
    heads: int
    tokens: int
    d: int
    e: int
    key_heads: int = 0

    @staticmethod
    def of(batch: int, heads: int, tokens: int, d: int, e: int | None = None, *, key_heads: int = 0) -> Size:
        """Values have the size of keys unless `e` is given."""
        return Size(batch, heads, tokens, d, d if e is None else e, key_heads)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads

    def __str__(self) -> str:
        per_head = f"D{self.d}" if self.d == self.e else f"d{self.d} e{self.e}"
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else f"{self.heads}"
        return f"B{self.batch} H{heads} T{self.tokens} {per_head}"

    def small(self) -> Size:
        """The same heads, fewer of them, over shorter texts: for machines without a GPU."""
        return Size(
            min(self.batch, MOST_SMALL_ROWS),
            min(self.heads, MOST_SMALL_ROWS),
            max(self.tokens // SMALL_IS_SHORTER_BY, 1),
            self.d,
            self.e,
        )


@final
@dataclass(frozen=True)
class Figures:
    """The cost of one call of one program; None if not measured, and `note` says why."""

    name: str
    #: largest relative error against float64, and its tensor; None if there is nothing to check
    error: float | None = None
    worst: str = ""
    first_call_s: float | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    #: half the distance between the quartiles over the median, for forward and backward
    spread: float | None = None
    samples: int = 0
    #: peak memory beyond inputs and outputs, forward and backward
    peak_bytes: int | None = None
    #: milliseconds of a forward pass or a step replayed as a CUDA graph: the time of the GPU alone
    graph_ms: float | None = None
    #: the same for forward and backward
    graph_forward_backward_ms: float | None = None
    #: CPU time of a forward call on a GPU, from the call until it returns, in microseconds
    issue_us: float | None = None
    #: the same per call of a loop of ten, after a pause and with cold CPU caches
    cold_issue_us: float | None = None
    note: str = ""
    #: whether the first call ran beside those of other cases (`--prepare`): alone it takes at most as long
    first_call_shared: bool = False


@final
@dataclass(frozen=True)
class Verdict:
    """A measured value and its limit; `reached` is None if they cannot be compared."""

    target: str
    value: float | None
    limit: float
    reached: bool | None
    note: str = ""


@final
@dataclass(frozen=True)
class CaseRecord:
    """One case: what ran, its error, its figures and those of its peers."""

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
    #: operations and bytes that a forward pass needs at least
    flops: float | None = None
    moved_bytes: float | None = None
    #: bytes of state read and written by one step, and this rate relative to a device copy in the same run
    state_traffic: int | None = None
    share_of_copy: float | None = None
    date: str = ""
    seconds: float = 0.0

    @property
    def reached(self) -> bool | None:
        """Whether every target is reached; None if none is missed but some could not be compared."""
        found = [verdict.reached for verdict in self.verdicts]
        if not found:
            return None
        return False if False in found else None if None in found else True


@final
@dataclass(frozen=True)
class Roofs:
    """The limits of the machine, measured in the same run."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    matmul_dtype: str


@final
@dataclass(frozen=True)
class BenchRecord:
    """A benchmark, finished or not."""

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
        """The record with one case added; it replaces an older record of the case."""
        kept = tuple(known for known in self.cases if known.name != case.name)
        return dataclasses.replace(self, cases=(*kept, case))

    def is_of(self, other: BenchRecord) -> bool:
        """Whether both have the same machine, code and shapes, and can be combined."""
        return (self.device, self.full_shapes) == (other.device, other.full_shapes) and _identity(
            self.made
        ) == _identity(other.made)


def _identity(made: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in made.items() if key != "date"}


# ------------------------------------------------------------------------------------------- files


def write_bench(record: BenchRecord, path: Path) -> None:
    """Write the file atomically; numbers that are not finite become null."""
    data = to_plain(record)
    for plain, case in zip(data["cases"], record.cases, strict=True):
        plain["reached"] = case.reached
    write_json(path, finite(data), SCHEMA, allow_nan=False)


def read_bench(path: Path) -> BenchRecord:
    """Read a file of write_bench."""
    missing = f"there is no benchmark at {path}: make one with maclaurin bench --out {path}."
    what = "a benchmark of maclaurin"
    return read_record(BenchRecord, path, SCHEMA, what, missing=missing, change=_without_derived)


def _without_derived(data: dict[str, Any]) -> None:
    for case in data["cases"]:
        case.pop("reached", None)  # follows from the verdicts
