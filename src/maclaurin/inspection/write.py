"""An inspection on disk: inspection.json and index.html, each whole or not there."""

from __future__ import annotations

from pathlib import Path

from maclaurin.inspection.page import page
from maclaurin.inspection.schema import FILE_NAME, Inspection, to_json
from maclaurin.inspection.stages import forget


def write_inspection(inspection: Inspection, out: Path) -> Path:
    """The page's path; the page is written last."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in ((FILE_NAME, to_json(inspection)), ("index.html", page(inspection))):
        part = out / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(out / name)
    forget(out)
    return out / "index.html"
