"""Text and synthetic tasks → batches. Knows no model."""

from maclaurin.data.batch import NOT_SCORED, Batch
from maclaurin.data.config import DataConfig, open_source
from maclaurin.data.errors import DamagedFileError, DataError
from maclaurin.data.source import Source

__all__ = [
    "NOT_SCORED",
    "Batch",
    "DamagedFileError",
    "DataConfig",
    "DataError",
    "Source",
    "open_source",
]
