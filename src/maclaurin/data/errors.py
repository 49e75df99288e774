"""What can go wrong with data, by name."""

from __future__ import annotations

from maclaurin.errors import MaclaurinError


class DataError(MaclaurinError):
    """Data that is not there, cannot be read, or cannot serve as asked."""


class DamagedFileError(DataError):
    """A file of the cache whose bytes are no longer those that were written."""
