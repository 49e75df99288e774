"""From the records of studies to tables, figures and one page. Needs no torch, but the extra `report`.

`page`, `figure` and `formatting` are what any page is made with, also that of an inspection or a memory: they
need jinja2, altair with vl-convert, and nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maclaurin.errors import MaclaurinError

if TYPE_CHECKING:
    from maclaurin.report.write import Report, write_report

__all__ = ["Report", "write_report"]

#: modules of the extra
NEEDED = ("scipy", "statsmodels", "altair", "vl_convert", "jinja2", "markupsafe", "numpy")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from maclaurin.report import write
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] not in NEEDED:
            raise
        raise MaclaurinError(
            f"a report needs {problem.name}: pip install 'maclaurin[report]'. Records are written and can "
            "be read without it."
        ) from None
    return getattr(write, name)
