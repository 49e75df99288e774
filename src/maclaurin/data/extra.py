"""Libraries that only some data needs, imported where they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from maclaurin.data.errors import DataError


def load_extra(library: str, purpose: str, instead: str = "") -> Any:
    """The library, or an error that names the extra which brings it and what works without it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        way_out = f", or {instead}" if instead else ""
        raise DataError(
            f"{purpose} needs the library {library}, which is not installed: "
            f"pip install 'maclaurin[data]'{way_out}."
        ) from None
