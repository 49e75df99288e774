"""The numbers of a run that cells can be compared by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from maclaurin.errors import InputError, did_you_mean

Scale = Literal["linear", "log", "logit"]


@final
@dataclass(frozen=True)
class Metric:
    """A number that every run records.

    name               as in the record of a run
    title              as on a page
    higher_is_better   the direction
    scale              on which differences are tested: logit for shares between 0 and 1, log for sizes
    """

    name: str
    title: str
    higher_is_better: bool = False
    scale: Scale = "linear"


#: what the trainer records of every run
METRICS = {
    metric.name: metric
    for metric in (
        Metric("loss", "test loss"),
        Metric("validation_loss", "validation loss"),
        Metric("accuracy", "accuracy", higher_is_better=True, scale="logit"),
        Metric("validation_accuracy", "validation accuracy", higher_is_better=True, scale="logit"),
        Metric("perplexity", "perplexity", scale="log"),
        Metric("validation_perplexity", "validation perplexity", scale="log"),
        Metric("tokens_per_second", "tokens per second", higher_is_better=True, scale="log"),
        Metric("seconds", "seconds of a run", scale="log"),
        Metric("peak_gpu_bytes", "peak GPU memory", scale="log"),
        Metric("training_flops", "training FLOPs", scale="log"),
        Metric("state_bytes", "bytes of state", scale="log"),
        Metric("parameters", "parameters", scale="log"),
    )
}


def metric_named(name: str) -> Metric:
    """The metric of that name, or an error that lists them."""
    if name not in METRICS:
        raise InputError(
            f"metric={name!r} is not recorded by any run; metrics are {', '.join(METRICS)}."
            f"{did_you_mean(name, METRICS)}"
        )
    return METRICS[name]
