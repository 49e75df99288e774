"""Text and synthetic tasks as batches, independent of any model."""

from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.data.source import NOT_SCORED, Batch, Source
from maclaurin.errors import DataError

__all__ = [
    "NOT_SCORED",
    "Batch",
    "DataConfig",
    "DataError",
    "Source",
    "open_source",
]
