"""Text and synthetic tasks as batches, independent of any model."""

from maclaurin.data.batch import NOT_SCORED, Batch
from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.data.data_errors import DataError
from maclaurin.data.source import Source

__all__ = [
    "NOT_SCORED",
    "Batch",
    "DataConfig",
    "DataError",
    "Source",
    "open_source",
]
