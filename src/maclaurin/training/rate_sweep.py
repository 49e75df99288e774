"""One short run at several learning rates, compared by validation loss."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.errors import InputError
from maclaurin.files import require_writable_folder
from maclaurin.plain_data import write_json
from maclaurin.training import trainer
from maclaurin.training.config import TrainConfig, load_config
from maclaurin.training.optimizer_step import Diverged


@final
@dataclass(frozen=True)
class Sweep:
    """The validation losses of the runs, or what else became of them.

    losses   learning rate → validation loss, or a text if the run diverged
    signal   the signal that ended the sweep early
    """

    steps: int
    losses: Mapping[float, float | str]
    signal: int | None = None

    @property
    def best(self) -> float | None:
        """The rate with the smallest loss; None if every run diverged."""
        finite = {rate: loss for rate, loss in self.losses.items() if isinstance(loss, float)}
        return min(finite, key=lambda rate: finite[rate]) if finite else None

    @property
    def next_rate(self) -> float | None:
        """A rate to try too, if the best one is the smallest or the largest of several."""
        if self.best is None or len(self.losses) == 1:
            return None
        if self.best == min(self.losses):
            return self.best / 2
        return self.best * 2 if self.best == max(self.losses) else None


class _Stopped(Exception):
    """A signal ended a run."""


def sweep(settings: Mapping[str, Any], rates: Sequence[float], out: Path) -> Sweep:
    """Train a run at each rate in OUT/lr-RATE, and write OUT/sweep.json; finished runs are not repeated.

    settings   of every run, as for `load_config`, without lr
    """
    if "lr" in settings:
        raise InputError("a sweep takes its learning rates from `rates`, not from `lr`.")
    if wrong := [rate for rate in rates if rate <= 0]:
        raise InputError(f"a learning rate must be positive, got {wrong[0]:g}.")
    require_writable_folder(out)
    configs = {rate: load_config(None, None, {"test": False, **settings, "lr": rate}) for rate in rates}
    steps, losses = next(iter(configs.values())).steps, {}
    for rate, config in configs.items():
        try:
            losses[rate] = _validation_loss(config, out / f"lr-{rate:g}")
        except _Stopped as stopped:
            return Sweep(steps, losses, stopped.args[0])
    found = Sweep(steps, losses)
    by_name = {f"{rate:g}": loss for rate, loss in losses.items()}
    write_json(out / "sweep.json", {"losses": by_name, "best": found.best})
    return found


def _validation_loss(config: TrainConfig, folder: Path) -> float | str:
    """The final validation loss of one run, trained now or earlier, or a text if it diverged."""
    try:
        outcome = trainer.train(config, folder, resume=(folder / "config.json").exists())
    except Diverged as problem:
        return f"diverged at step {problem.step}"
    if not outcome.finished:
        raise _Stopped(outcome.signal or signal.SIGTERM)
    if outcome.validation is None:
        raise InputError("a sweep compares validation losses: use a validation_fraction above 0.")
    return outcome.validation.loss
