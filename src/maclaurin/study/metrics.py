"""The metrics by which cells can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, final, get_args

from maclaurin.errors import InputError
from maclaurin.wording import did_you_mean

Scale = Literal["linear", "log", "logit"]


@final
@dataclass(frozen=True)
class Metric:
    """A number that every run records.

    name               as in the record of a run
    title              as on a page
    higher_is_better   the direction
    scale              scale on which differences are tested: logit for shares between 0 and 1, log for sizes
    """

    name: str
    title: str
    higher_is_better: bool = False
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        if self.scale not in get_args(Scale):
            raise InputError(
                f"metric {self.name!r}: scale is {', '.join(get_args(Scale))}, got {self.scale!r}."
                f"{did_you_mean(str(self.scale), get_args(Scale))}"
            )
        if not self.title.strip():
            raise InputError(f"metric {self.name!r} needs a title for the page, such as 'test loss'.")


#: the numbers that the trainer records for every run
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
        Metric("memory_bytes", "bytes kept at the trained length", scale="log"),
        Metric("parameters", "parameters", scale="log"),
    )
}
#: everything that a run records at its end, apart from the numbers of tasks
RECORDED = (*METRICS, "scored_tokens", "validation_scored_tokens")
#: numbers of the final evaluation on test data, which tuning runs do not have
METRICS_OF_TEST_DATA = ("loss", "accuracy", "perplexity")

#: prefix of the metrics of a task of `maclaurin eval`: task:NAME, or task:NAME:NUMBER for another number
TASK = "task:"
#: the metric that task:NAME stands for: the share of right answers
RIGHT_ANSWERS = ("acc", "exact_match")
#: other numbers of tasks, with their titles on a page
_TASK_NUMBERS = {
    "log_odds": Metric("log_odds", "log-odds of the right answer", higher_is_better=True),
    "log_odds_gain": Metric("log_odds_gain", "gain in log-odds", higher_is_better=True),
    "bits_per_byte": Metric("bits_per_byte", "bits per byte"),
    "byte_perplexity": Metric("byte_perplexity", "perplexity of a byte", scale="log"),
    "word_perplexity": Metric("word_perplexity", "perplexity of a word", scale="log"),
}


def task_number(task: str, number: str) -> str:
    """The name of a task's number among the metrics of a run."""
    return f"{TASK}{task}" if number in RIGHT_ANSWERS else f"{TASK}{task}:{number}"


def task_of(metric: str) -> str | None:
    """The task of a metric; None if it is not about a task."""
    return metric.removeprefix(TASK).partition(":")[0] if metric.startswith(TASK) else None


def _task_metric(name: str) -> Metric:
    task, _, number = name.removeprefix(TASK).partition(":")
    if not number:
        return Metric(name, f"accuracy in {task}", higher_is_better=True, scale="logit")
    if number not in _TASK_NUMBERS:
        raise InputError(
            f"metric={name!r}: {number!r} is not a number of a task; {TASK}{task} is the share of right "
            f"answers, and {TASK}{task}:NUMBER takes {', '.join(_TASK_NUMBERS)}."
            f"{did_you_mean(number, _TASK_NUMBERS)}"
        )
    found = _TASK_NUMBERS[number]
    return Metric(name, f"{found.title} in {task}", found.higher_is_better, found.scale)


def metric_named(name: str) -> Metric:
    """The metric of that name, or an error that lists them."""
    if name.startswith(TASK):
        return _task_metric(name)
    if name not in METRICS:
        raise _unrecorded(name, METRICS)
    return METRICS[name]


def require_recorded(metric: Metric) -> None:
    """Raise unless runs record a number of this name that has a place on the scale.

    The title and the scale may be your own.
    """
    if not metric.name.startswith(TASK) and metric.name not in RECORDED:
        raise _unrecorded(metric.name, RECORDED)
    ours = _task_metric(metric.name) if metric.name.startswith(TASK) else METRICS.get(metric.name)
    is_share = ours is not None and ours.scale == "logit"
    if metric.scale == "logit" and not is_share:
        raise InputError(
            f"metric={metric.name!r}: scale='logit' is for shares between 0 and 1, such as accuracy."
        )
    if metric.scale == "log" and (is_share or "log_odds" in metric.name):
        raise InputError(
            f"metric={metric.name!r}: scale='log' is for numbers above 0, such as a loss or a size; this one "
            "can be 0 or less."
        )


def _unrecorded(name: str, known: Iterable[str]) -> InputError:
    return InputError(
        f"metric={name!r} is not recorded by any run; metrics are {', '.join(known)}, and {TASK}NAME."
        f"{did_you_mean(name, known)}"
    )
