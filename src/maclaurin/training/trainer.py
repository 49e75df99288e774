"""The loop: batches → losses → steps, with everything written down and nothing lost.

The loss of a step is Σ losses / Σ scored tokens over the whole batch, whatever number of processes and
accumulated parts it is computed in. The batch is a function of seed and step, so a run that was killed
goes on bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from maclaurin.data.batch import Batch
from maclaurin.data.source import Source
from maclaurin.data.splits import TEST, VALIDATION
from maclaurin.errors import InputError
from maclaurin.models import MaclaurinForCausalLM, save_quietly
from maclaurin.training.checkpoint import CheckpointStore, Progress
from maclaurin.training.config import TrainConfig
from maclaurin.training.display import Display, TerminalDisplay
from maclaurin.training.estimate import flops_per_token
from maclaurin.training.evaluation import Evaluation, evaluate
from maclaurin.training.health import Diverged, is_healthy, layer_statistics
from maclaurin.training.lora import merge_adapters
from maclaurin.training.objectives import objective_of
from maclaurin.training.optimizer import make_optimizer
from maclaurin.training.processes import Processes
from maclaurin.training.records import Records, make_trackers, require_trackers
from maclaurin.training.run_folder import RunFolder
from maclaurin.training.schedule import learning_rate
from maclaurin.training.starting import model_config, starting_model
from maclaurin.training.tokenizer_folder import keep_tokenizer


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    validation: Evaluation | None  # the last one
    test: Evaluation | None  # of a finished run alone
    tokens_per_second: float


class Trainer:
    """One run from its first step, or from its last checkpoint, to its end."""

    def __init__(self, config: TrainConfig, source: Source, folder: Path, processes: Processes) -> None:
        self.config, self.source, self.processes = config, source, processes
        self.folder = RunFolder(folder)
        if config.batch_size % (processes.world * config.accumulate):
            raise InputError(
                f"a batch of {config.batch_size} rows cannot be split over {processes.world} processes and "
                f"{config.accumulate} accumulated parts."
            )
        torch.manual_seed(config.seed)
        self.plain_model = starting_model(config, source)
        self.plain_model.to(processes.device)  # type: ignore[arg-type]
        if config.gradient_checkpointing:
            self.plain_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.objective = objective_of(config, self.plain_model, processes)
        self.model = _distributed(self.plain_model, config, processes)
        self.optimizer = make_optimizer(self.model, config)
        self.store = CheckpointStore(self.folder.checkpoints, processes, config.keep)
        self.best_loss: float | None = None
        self.validation_loss: float | None = None
        self.final_test: Evaluation | None = None
        self._stop = threading.Event()
        self._speeds: list[float] = []

    # ---------------------------------------------------------------------------------- the run

    def run(self, *, resume: bool = False, display: Display | None = None) -> Outcome:
        """Train to the last step; a signal to stop saves and returns early.

        `display` is told how it gets on; by default that is the terminal.
        """
        require_trackers(self.config.trackers)
        start = self._begin(resume)
        records = self._records(start if resume else None) if self.processes.is_first else None
        if display is None:
            title = " | ".join(self.config.attention[:1])
            display = TerminalDisplay(title, self.config.steps, start, visible=self.processes.is_first)
        self.model.train()
        with display, _stopped_by_signals(self._stop):
            try:
                return self._steps(start, records, display)
            finally:
                if records is not None:
                    records.close()

    def _records(self, resume_at: int | None) -> Records:
        """The run's lines on disk, and the trackers that want them too."""
        trackers = make_trackers(self.config.trackers, self.folder.path, self.config.to_dict(), resume_at)
        return Records(self.folder.records, resume_at, trackers)

    def _begin(self, resume: bool) -> int:
        """The step to begin with; files of the run are made or checked."""
        if not resume:
            if self.processes.is_first:
                facts = {"name": self.source.name, "fingerprint": self.source.fingerprint}
                self.folder.start(self.config, facts)
            self.processes.wait()
            return 0
        if not self.folder.config.exists():
            raise InputError(f"{self.folder.path} holds no run to resume: leave --resume out to begin one.")
        self.folder.check_same(self.config, self.source.fingerprint)
        latest = self.store.latest()
        if latest is None:
            return 0
        progress = self.store.load(latest, self.model, self.optimizer)
        self.best_loss, self.validation_loss = progress.best_loss, progress.validation_loss
        return progress.step

    def _steps(self, start: int, records: Records | None, display: Display) -> Outcome:
        pending: list[tuple[int, float, Tensor, Tensor]] = []  # what the device has not been asked for yet
        since, counted, speed, validation = time.perf_counter(), start, 0.0, None
        for step in range(start, self.config.steps):
            rate = learning_rate(self.config, step)
            loss, norm = self._step(step, rate)
            pending.append((step, rate, loss, norm))
            done = step + 1
            stopping = self.processes.any(self._stop.is_set()) if self._may_stop(done) else False
            due = self._due(done, stopping)
            if due or done % self.config.log_every == 0:
                last = self._write_losses(pending, records)
                now = time.perf_counter()
                speed = (done - counted) * self.config.batch_size * self.source.length / (now - since)
                self._speeds.append(speed)
                since, counted = now, done
                display.step(done, last, speed)
            if due:
                validation = self._pause(done, due, records, display) or validation
                since, counted = time.perf_counter(), done
            if stopping:
                display.say(f"stopped after step {done}, saved; go on with --resume")
                return Outcome(done, False, validation, None, speed)
        if start >= self.config.steps:  # everything was done, and the end may have been cut short
            validation = self._evaluate(self.config.steps, None)
            self.final_test = self._test(None)
        self._save_model()
        outcome = Outcome(self.config.steps, True, validation, self.final_test, self._median_speed())
        self._write_summary(outcome)
        return outcome

    def _step(self, step: int, rate: float) -> tuple[Tensor, Tensor]:
        """One optimizer step: (loss, gradient norm), left on the device."""
        config, world = self.config, self.processes.world
        parts = [b.to(self.processes.device, non_blocking=True) for b in self._batches(step)]
        scored = self.processes.total(sum((b.targets != -100).sum() for b in parts).float())  # type: ignore[union-attr]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.processes.device)
        for number, batch in enumerate(parts):
            with self._autocast(), self._no_sync(number < len(parts) - 1):
                losses, _ = self.objective(self.model, batch)
                loss = losses.sum() / scored
                (loss * world).backward()  # gradients are averaged over processes
            total += loss.detach()
        limit = config.clip if config.clip else float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        full = getattr(norm, "full_tensor", None)
        return self.processes.total(total), (full() if full else norm).detach()

    def _batches(self, step: int) -> list[Batch]:
        """This process's share of the step's batch, in the parts it is computed in."""
        step = 0 if self.config.overfit_one_batch else step
        whole = self.source.train_batch(
            step, self.config.batch_size, rank=self.processes.rank, world=self.processes.world
        )
        size = whole.tokens.shape[0] // self.config.accumulate
        return [
            Batch(
                whole.tokens[i : i + size],
                whole.targets[i : i + size],
                None if whole.documents is None else whole.documents[i : i + size],
            )
            for i in range(0, whole.tokens.shape[0], size)
        ]

    # ------------------------------------------------------------------------ what comes between

    def _due(self, done: int, stopping: bool) -> set[str]:
        config, last = self.config, done == self.config.steps

        def every(steps: int) -> bool:
            return last or (steps > 0 and done % steps == 0)

        due = {"evaluate"} if every(config.eval_every) else set()
        return due | ({"save"} if stopping or every(config.checkpoint_every) else set())

    def _may_stop(self, done: int) -> bool:
        """With several processes, ask each other only now and then."""
        return self.processes.world == 1 or done % self.config.log_every == 0

    def _pause(
        self, done: int, due: set[str], records: Records | None, display: Display
    ) -> Evaluation | None:
        evaluation = None
        if "evaluate" in due:
            evaluation = self._evaluate(done, records)
            figures = f"validation loss {evaluation.loss:.4f}, accuracy {evaluation.accuracy:.3f}"
            display.say(f"step {done}: {figures}")
            if done == self.config.steps:
                self.final_test = self._test(records)
        if records is not None:
            records.flush()
        if "save" in due:
            progress = Progress(done, self.validation_loss, self.best_loss, self.source.fingerprint)
            self.store.save(progress, self.model, self.optimizer)
        return evaluation

    def _evaluate(self, done: int, records: Records | None) -> Evaluation:
        """Validation loss over `eval_rows`, so that a curve compares like with like; at the end over all."""
        found = self._evaluation_on(VALIDATION, self.config.eval_rows)
        self.validation_loss = found.loss
        self.best_loss = found.loss if self.best_loss is None else min(self.best_loss, found.loss)
        if records is not None:
            records.write({"kind": "validation", "step": done, **_figures(found)})
        if done < self.config.steps:
            return found
        whole = found if self.config.eval_rows is None else self._evaluation_on(VALIDATION, None)
        if records is not None:
            records.write({"kind": "final-validation", "step": done, **_figures(whole)})
        return whole

    def _test(self, records: Records | None) -> Evaluation:
        """The whole test split, once, after the last step."""
        found = self._evaluation_on(TEST, None)
        if records is not None:
            final = {"kind": "final", "step": self.config.steps, **_figures(found)}
            records.write({**final, "loss_by_position": found.loss_by_position})
        return found

    def _evaluation_on(self, split: str, rows: int | None) -> Evaluation:
        """The first so many rows of a split, or all of them."""
        share = {"rank": self.processes.rank, "world": self.processes.world}
        with self._autocast():
            if self.config.overfit_one_batch:
                batches: Iterator[Batch] = iter(self._batches(0))
            else:
                batches = self.source.held_out_batches(split, self.config.batch_size, rows, **share)
            return evaluate(self.model, batches, self.processes, self.source.length, self.objective)

    def _write_losses(
        self, pending: list[tuple[int, float, Tensor, Tensor]], records: Records | None
    ) -> float:
        """Ask the device for the losses so far, stop if one is ill, write them down."""
        losses = torch.stack([loss for _, _, loss, _ in pending]).cpu()
        norms = torch.stack([norm for _, _, _, norm in pending]).cpu()
        if not is_healthy(losses, self.config.largest_loss):
            ill = next(i for i, x in enumerate(losses) if not is_healthy(x, self.config.largest_loss))
            raise Diverged(
                pending[ill][0] + 1,
                float(losses[ill]),
                self.config.largest_loss,
                layer_statistics(self.plain_model),
                self.store.latest(),
            )
        if records is not None:
            for (step, rate, _, _), loss, norm in zip(pending, losses.tolist(), norms.tolist(), strict=True):
                records.write(
                    {"kind": "train", "step": step + 1, "loss": loss, "lr": rate, "gradient_norm": norm}
                )
        pending.clear()
        return float(losses[-1])

    def _save_model(self) -> None:
        """The final weights as an ordinary model folder."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        if self.config.lora:
            merge_adapters(self.plain_model)
            weights = self.plain_model.state_dict()
        else:
            weights = get_model_state_dict(self.model, options=options)
        if self.processes.is_first:
            keep_tokenizer(self.source, self.plain_model, self.folder.model)
            save_quietly(self.plain_model, self.folder.model, weights)
        self.processes.wait()

    def _median_speed(self) -> float:
        """Tokens per second, as most stretches between two looks at the losses had it."""
        return statistics.median(self._speeds) if self._speeds else 0.0

    def _write_summary(self, outcome: Outcome) -> None:
        """What a table of runs needs of this one; speeds are in no record, so that those stay the same."""
        if not self.processes.is_first or outcome.test is None or outcome.validation is None:
            return
        found = outcome.test
        cuda = self.processes.device.type == "cuda"
        summary = {
            "step": outcome.step,
            "validation_loss": outcome.validation.loss,
            "validation_tokens": outcome.validation.tokens,
            "test_loss": found.loss,
            "perplexity": found.perplexity,
            "accuracy": found.accuracy,
            "tokens": found.tokens,
            "parameters": sum(p.numel() for p in self.plain_model.parameters()),
            "tokens_per_second": outcome.tokens_per_second,
            "flops_per_token": flops_per_token(
                self.plain_model, model_config(self.config, self.source), self.source.length
            ),
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        }
        self.folder.summary.write_text(json.dumps(summary, indent=1) + "\n")

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.config.precision == "bf16":
            return torch.autocast(self.processes.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _no_sync(self, more_to_come: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged with the last part of a batch only."""
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if more_to_come and no_sync is not None else contextlib.nullcontext()


def _figures(found: Evaluation) -> dict[str, Any]:
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "tokens": found.tokens,
    }


def _distributed(model: MaclaurinForCausalLM, config: TrainConfig, processes: Processes) -> nn.Module:
    """The model as the processes share it."""
    whole: nn.Module = model
    if processes.world > 1 and config.parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    elif processes.world > 1:
        devices = [processes.device] if processes.device.type == "cuda" else None
        whole = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    return torch.compile(whole) if config.compile else whole  # type: ignore[return-value]


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask the loop to save and end; a second Ctrl-C ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
