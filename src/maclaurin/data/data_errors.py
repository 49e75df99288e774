"""Errors about data, and libraries that only some data needs."""

from __future__ import annotations

import importlib
from typing import Any

from maclaurin.errors import MaclaurinError


class DataError(MaclaurinError):
    """Data that is missing, cannot be read, or cannot be used as asked."""


def load_extra(library: str, purpose: str, instead: str = "") -> Any:
    """Import the library, or raise an error that names the extra with it and what works without it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        alternative = f", or {instead}" if instead else ""
        raise DataError(
            f"{purpose} needs the library {library}, which is not installed: "
            f"pip install 'maclaurin[data]'{alternative}."
        ) from None
