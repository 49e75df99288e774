"""From the records of studies to tables, figures and one page. Needs no torch, but the extra `report`.

Every page is made with `page`, `figure` and `formatting`, also those of inspections and memories. `page`
needs jinja2, `figure` needs altair and vl-convert, and `formatting` needs no optional package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maclaurin.errors import load_extra

if TYPE_CHECKING:
    from maclaurin.report.write import Report, write_report

__all__ = ["Report", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load_extra("maclaurin.report.write", "report", "a report"), name)
