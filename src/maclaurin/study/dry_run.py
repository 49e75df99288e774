"""`--dry-run`: what each run would take, counted without opening any data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch

from maclaurin.data.named import is_task, open_task
from maclaurin.data.text_tokenizers import Bytes
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.study.plan import PlannedRun
from maclaurin.training.config import TrainConfig
from maclaurin.training.estimate import ASSUMED_UTILISATION, estimate, flops_per_token

#: of tokenizers that are only on the hub
ASSUMED_VOCABULARY = 32_000


@final
@dataclass(frozen=True)
class RunEstimate:
    """One run; see training.estimate.Estimate."""

    run: PlannedRun
    parameters: int
    tokens: int
    flops: float
    seconds: float


def estimate_runs(runs: Sequence[PlannedRun]) -> list[RunEstimate]:
    """Exact counts, and the time one device of this machine would take."""
    return [_estimate(run) for run in runs]


def _estimate(run: PlannedRun) -> RunEstimate:
    config = run.config
    length, vocabulary = rows_of(config)
    parameters, flops = _counted(config.attention, config.size, config.kv_heads, vocabulary, length)
    tokens = config.steps * config.batch_size * length
    speed = ASSUMED_UTILISATION * _matmul_speed(config.precision)
    return RunEstimate(run, parameters, tokens, tokens * flops, tokens * flops / speed)


def rows_of(config: TrainConfig) -> tuple[int, int]:
    """Length of a row and size of the vocabulary, from what the data are called."""
    length = config.length or size_named(config.size).length
    if is_task(config.data):
        task = open_task(config.data, length)
        return task.length, task.vocab_size
    kind, _, rest = config.tokenizer.partition(":")
    if kind == "bytes":
        return length, Bytes().vocab_size
    return length, int(rest) if kind == "bpe" and rest.isdecimal() else ASSUMED_VOCABULARY


@cache
def _counted(
    attention: tuple[str, ...], size: str, kv_heads: int | None, vocabulary: int, length: int
) -> tuple[int, float]:
    """(parameters, FLOPs of a token)"""
    model_config = _model_config(attention, size, kv_heads, vocabulary)
    with torch.device("meta"):
        model = MaclaurinForCausalLM(model_config)
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, flops_per_token(model, model_config, length)


@cache
def _matmul_speed(precision: str) -> float:
    """FLOP/s of this machine's fastest device."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = TrainConfig(precision=precision)
    return estimate(config, _model_config(("exp/sum",), "nano", None, 2), 1, device).matmul_flops_per_second


def _model_config(
    attention: tuple[str, ...], size: str, kv_heads: int | None, vocabulary: int
) -> MaclaurinConfig:
    layers = attention[0] if len(attention) == 1 else list(attention)
    return MaclaurinConfig.of_size(size_named(size), layers, vocabulary, num_key_value_heads=kv_heads)
