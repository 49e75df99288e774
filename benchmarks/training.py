"""Training speed on this CPU, as ratios within one run. Results go to benchmarks/results/training.json.

    python benchmarks/training.py

Against Llama, and our loop against a minimal one: nano, rows of 256 tokens, batch of 16. Steps of the study
mini against those of softmax: its own configs, one thread each, as its runs on two cores have.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import stamp
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from maclaurin.data.data_config import DataConfig, open_source
from maclaurin.models import SIZES, MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.study import Experiment
from maclaurin.study.find import load_study
from maclaurin.training.batches import open_data
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.model import model_config
from maclaurin.training.optimizer_step import make_optimizer
from maclaurin.training.processes import Processes
from maclaurin.training.trainer import Trainer

RESULTS = Path(__file__).parent / "results" / "training.json"
LENGTH, ROWS, VOCABULARY = 256, 16, 1024
SPECS = ["exp/sum", "exp/l2", "exp/len*out", "taylor(2)/sum", "linear(elu1)/sum", "power(2)*forget/sum"]
#: the most that a step of a cell of the study mini may take, in steps of softmax
STEP_TARGET = 1.3


def forward_backward(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        logits = model(input_ids=tokens).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        model.zero_grad()

    return run


def seconds_in_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each, timed in turns so that changes of the machine affect all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            begun = clock()
            run()
            if turn:
                times[name].append(clock() - begun)
    return {name: statistics.median(values) for name, values in times.items()}


def against_llama() -> dict[str, float]:
    """Tokens per second over those of transformers' Llama with SDPA."""
    size, tokens = SIZES["nano"], torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    llama = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",  # type: ignore[call-arg]
    )
    runs = {"llama": forward_backward(LlamaForCausalLM(llama), tokens)}
    for spec in SPECS:
        model = MaclaurinForCausalLM(MaclaurinConfig.of_size(size, spec, VOCABULARY))
        runs[spec] = forward_backward(model, tokens)
    seconds = seconds_in_turns(runs, 5)
    return {spec: seconds["llama"] / seconds[spec] for spec in SPECS}


def loop_overhead(steps: int = 30) -> float:
    """Seconds per step of the trainer relative to a minimal loop with the same model, batches and optimizer.

    The time of 2n steps minus that of n steps is n steps of the loop with its records, checks and display. It
    excludes what a run does once (evaluation, checkpoint, saving the model): a minimal loop has none of it.
    """
    data = DataConfig("mqar:pairs=8,vocab=256", length=LENGTH)
    source = open_source(data)
    ratios = []
    for _ in range(3):
        bare = bare_seconds(source, run_of(steps, data))
        ratios.append(
            (run_seconds(source, run_of(2 * steps, data)) - run_seconds(source, run_of(steps, data))) / bare
        )
    return statistics.median(ratios)


def run_of(steps: int, data: DataConfig) -> TrainConfig:
    return TrainConfig(
        steps=steps, batch_size=ROWS, length=LENGTH, data=data.data, eval_every=0, checkpoint_every=0
    )


def run_seconds(source: Any, config: TrainConfig) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, source, Path(folder) / "run", Processes(0, 1, torch.device("cpu")))
        begun = time.perf_counter()
        trainer.run()
        return time.perf_counter() - begun


def bare_seconds(source: Any, config: TrainConfig) -> float:
    model = MaclaurinForCausalLM(model_config(config, source))
    optimizer = make_optimizer(model, config)
    begun = time.perf_counter()
    for step in range(config.steps):
        batch = source.train_batch(step, config.batch_size)
        logits = model(input_ids=batch.tokens).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return time.perf_counter() - begun


def study_steps(name: str, rounds: int = 100) -> dict[str, Any]:
    """Time per optimizer step of every cell of a study, over that of the baseline of its experiment."""
    torch.set_num_threads(1)
    measured = {e.name: steps_of(e, rounds) for e in load_study(name).experiments}
    most = max(ratio for ratios in measured.values() for ratio in ratios.values())
    return {**measured, "target": STEP_TARGET, "holds": most <= STEP_TARGET}


def steps_of(experiment: Experiment, rounds: int) -> dict[str, float]:
    """In seconds of this process: with one thread, other processes on the machine do not count."""
    runs = {cell.name: step_of(experiment.settings(cell)) for cell in experiment.cells}
    seconds = seconds_in_turns(runs, rounds, time.process_time)
    return {cell: seconds[cell] / seconds[experiment.baseline] for cell in runs}


def step_of(settings: Mapping[str, Any]) -> Callable[[], object]:
    """One optimizer step of the trainer, always on the same batch."""
    config, processes = config_from(settings), Processes(0, 1, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, open_data(config, processes), Path(folder) / "run", processes)
    return partial(trainer.step, trainer.batch(0), config.lr)


def main() -> None:
    torch.manual_seed(0)
    figures = {
        "tokens per second over llama's": against_llama(),
        "loop over bare loop": loop_overhead(),
        "step of the study mini over softmax's": study_steps("mini"),  # last: it leaves one thread
    }
    RESULTS.write_text(json.dumps({"machine": stamp(), **figures}, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
