"""One call for a whole run: open the data, join the processes, train."""

from __future__ import annotations

from pathlib import Path

from maclaurin.data.config import DataConfig, open_source
from maclaurin.data.source import Source
from maclaurin.training.config import TrainConfig
from maclaurin.training.display import Display
from maclaurin.training.processes import Processes, join, leave
from maclaurin.training.starting import row_length
from maclaurin.training.trainer import Outcome, Trainer


def data_config(config: TrainConfig) -> DataConfig:
    """What of a run's config the data depend on."""
    return DataConfig(
        data=config.data,
        tokenizer=config.tokenizer,
        length=row_length(config),
        rows=config.rows,
        cross_documents=config.cross_documents,
        limit_documents=config.limit_documents,
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
        seed=config.seed,
    )


def open_data(config: TrainConfig, processes: Processes) -> Source:
    """The first process prepares the cache, then the others find it there."""
    if processes.is_first:
        source = open_source(data_config(config))
        processes.wait()
        return source
    processes.wait()
    return open_source(data_config(config), progress=False)


def train(config: TrainConfig, out: Path, *, resume: bool = False, display: Display | None = None) -> Outcome:
    """Run it in `out`; with `resume`, from the last whole checkpoint there."""
    processes = join(config.device)
    try:
        source = open_data(config, processes)
        return Trainer(config, source, out, processes).run(resume=resume, display=display)
    finally:
        leave()
