"""How well the forms agree, measured once per version of the code, in a separate process."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

from maclaurin.code_version import code_version
from maclaurin.plain_data import read_or_none, to_plain, write_json
from maclaurin.study.executors import without_main_module
from maclaurin.study.run_record import FormsRecord

#: one of each kind of part
SPECS = (
    "exp/sum", "exp/l2", "exp/rms", "exp*out", "exp/len", "exp*in*forget/l2",
    "linear(elu1)/sum", "linear(relu)/sum", "taylor(1)/l2", "taylor(2)/sum", "taylor(4)/sum",
    "taylor(2,about=mean)/sum", "power(2)/sum", "hermite(2)/sum",
)  # fmt: skip
ORDERS = tuple(range(0, 17, 2))
TOKENS, KEY_SIZE = 24, 4


def measure_forms() -> FormsRecord:
    """Largest relative errors in float64: of each form, and of the series at each order."""
    import torch

    from maclaurin.spec.catalogue import resolve
    from maclaurin.testing.agreement import agreement, convergence
    from maclaurin.testing.cases import Shape, random_tensors

    torch.set_num_threads(1)
    shape = Shape(batch=1, tokens=TOKENS, kv_heads=1, group=2, d=KEY_SIZE, e=KEY_SIZE + 1)
    rows: list[dict[str, Any]] = []
    for text in SPECS:
        case = random_tensors(resolve(text), shape, 0, torch.float64)
        rows += [
            {"spec": found.spec, "form": found.form, "error": found.value_error}
            for found in agreement(case, chunk_size=8)
            if found.value_error is not None
        ]
    points = convergence(shape, list(ORDERS), 0, 1.0)
    return FormsRecord(
        agreement=tuple(rows),
        series=tuple({"order": point.order, "error": point.about_zero} for point in points),
    )


def read_forms(path: Path) -> FormsRecord | None:
    """The measurement of this version of the code; None if there is none."""
    return read_or_none(FormsRecord, path, _require_this_code)


def _require_this_code(data: dict[str, Any]) -> None:
    if data.pop("code") != code_version():
        raise ValueError("measured with another version of the code")


@final
class FormsCheck:
    """The measurement in a separate process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start, unless the result exists already."""
        if read_forms(self._path) is None:
            context = multiprocessing.get_context("forkserver")
            self._process = context.Process(target=_measure_to, args=(str(self._path),), daemon=True)
            with without_main_module():
                self._process.start()

    def result(self) -> FormsRecord | None:
        """The result; None while it is not there."""
        return read_forms(self._path)

    def wait(self, seconds: float) -> FormsRecord | None:
        """The result, after waiting at most this long."""
        if self._process is not None:
            self._process.join(seconds)
        return self.result()

    def close(self) -> None:
        """Kill the process if it still runs."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()


def _measure_to(path: str) -> None:
    import signal
    import warnings

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    found = measure_forms()
    write_json(Path(path), {"code": code_version(), **to_plain(found)})
