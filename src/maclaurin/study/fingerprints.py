"""The fingerprint of each run's data: opened, and prepared where needed, once for all seeds."""

from __future__ import annotations

import dataclasses
from typing import final

from maclaurin.data.config import DataConfig, open_source
from maclaurin.data.source import Source
from maclaurin.training.batches import data_config
from maclaurin.training.config import TrainConfig


@final
class Fingerprints:
    """Opens data before the runs do, so that they are prepared by one process and known to all."""

    def __init__(self) -> None:
        self._opened: dict[DataConfig, Source] = {}

    def source(self, config: TrainConfig) -> Source:
        """The run's data."""
        wanted = data_config(config)
        seedless = dataclasses.replace(wanted, seed=0)
        if seedless not in self._opened:
            self._opened[seedless] = open_source(seedless)
        return dataclasses.replace(self._opened[seedless], seed=wanted.seed)  # type: ignore[type-var]
