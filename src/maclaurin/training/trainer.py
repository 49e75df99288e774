"""The training loop, and `train`, which runs it on a config and a folder.

The batch of a step is a function of seed and step, so a run that was killed continues bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from maclaurin.data.source import Source
from maclaurin.errors import InputError
from maclaurin.training.batches import Prefetch, StepBatch, held_out_batches, open_data
from maclaurin.training.checkpoint import CheckpointStore, Progress
from maclaurin.training.compiling import end_compile_workers, first_compiled_step, is_compiled
from maclaurin.training.config import TrainConfig
from maclaurin.training.estimate import flops_per_token
from maclaurin.training.losses import Evaluation, evaluate, objective_of
from maclaurin.training.model import model_config, save_adapters, save_model, starting_model, with_adapters
from maclaurin.training.processes import Processes, join, leave
from maclaurin.training.records import Records, make_trackers, read_records, require_trackers
from maclaurin.training.run_folder import RunFolder, write_json
from maclaurin.training.step import (
    Diverged,
    OptimizerStep,
    StepResult,
    largest_gradients,
    learning_rate,
    problem_with,
)
from maclaurin.training.terminal import Display, TerminalDisplay

#: the held-out data of evaluations during training, and of the final one
EVALUATED_ON = "test"
FINALLY_EVALUATED_ON = "test"


def train(config: TrainConfig, out: Path, *, resume: bool = False, display: Display | None = None) -> Outcome:
    """Train in the folder `out`; with `resume`, from the last complete checkpoint there."""
    RunFolder(out).require(resume=resume)
    require_trackers(config.trackers)
    processes = join(config.device)
    try:
        source = open_data(config, processes)
        return Trainer(config, source, out, processes).run(resume=resume, display=display)
    finally:
        leave()


@final
@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    evaluation: Evaluation | None
    tokens_per_second: float
    #: the signal that stopped it early
    signal: int | None = None


@final
@dataclass(frozen=True)
class _Unread:
    """A step whose numbers are still on the device."""

    step: int
    rate: float
    result: StepResult


@final
class Trainer:
    """One run, from its first step or its last checkpoint to its end."""

    def __init__(self, config: TrainConfig, source: Source, folder: Path, processes: Processes) -> None:
        self.config, self.source, self.processes = config, source, processes
        self.folder = RunFolder(folder)
        if config.batch_size % (processes.world * config.accumulate):
            raise InputError(
                f"a batch of {config.batch_size} rows cannot be split over {processes.world} processes and "
                f"{config.accumulate} accumulated parts: use a multiple of "
                f"{processes.world * config.accumulate}."
            )
        torch.manual_seed(config.seed)
        self.plain_model = starting_model(config, source)
        self.adapters: Any = self._with_adapters() if config.lora else None
        self.plain_model.to(processes.device)  # type: ignore[arg-type]
        if config.gradient_checkpointing:
            self.plain_model.gradient_checkpointing_enable({"use_reentrant": False})
        self.objective = objective_of(config, self.plain_model, processes)
        self.step = OptimizerStep(self.objective, config, processes)
        self.store = CheckpointStore(self.folder.checkpoints, processes, config.keep)
        self._compiled = is_compiled(config, self.objective, processes)
        self._records: Records | None = None
        self._evaluated: tuple[int, float] | None = None  # step and loss of the last evaluation
        self._speed = _Speed(config.batch_size * source.length)

    def _with_adapters(self) -> Any:
        if self.config.parallel == "fsdp" and self.processes.world > 1:
            raise InputError("lora does not work with parallel=fsdp: use parallel=ddp.")
        return with_adapters(self.plain_model, self.config.lora, self.config.start)

    # ---------------------------------------------------------------------------------- the run

    def run(self, *, resume: bool = False, display: Display | None = None) -> Outcome:
        """Train to the last step; a signal to stop saves a checkpoint and returns early.

        Progress goes to `display`, by default the terminal. Files are written after the first step, so that
        settings that cannot work leave nothing behind.
        """
        self.folder.require(resume=resume)
        require_trackers(self.config.trackers)
        with self.folder.locked() if self.processes.is_first else contextlib.nullcontext():
            start = self._load() if resume else 0
            if display is None:
                title = self.config.attention[0] if self.config.start is None else self.config.start
                display = TerminalDisplay(title, self.config.steps, start, visible=self.processes.is_first)
            self.objective.train()
            try:
                return self._run(start, resume, display)
            finally:
                if self._records is not None:
                    self._records.close()
                if self._compiled:
                    end_compile_workers()

    def _run(self, start: int, resume: bool, display: Display) -> Outcome:
        with display, _StopRequest() as stop, Prefetch(self.batch, start, self.config.steps) as batches:
            evaluation = None
            unread: list[_Unread] = []
            for step in range(start, self.config.steps):
                rate = learning_rate(self.config, step)
                if step == start:
                    result = self._first_step(batches.take(), rate, display)
                    self._open_files(start, resume, display)
                    self._speed.start(step + 1)
                else:
                    result = self.step(batches.take(), rate)
                unread.append(_Unread(step, rate, result))
                done = step + 1
                stopping = self._may_stop(done) and self.processes.any(stop.is_set)
                due = self._due(done, stopping)
                if due or done % self.config.log_every == 0:
                    display.step(done, self._record_losses(unread), self._speed.lap(done))
                if due:
                    evaluation = self._pause(done, due, display) or evaluation
                    self._speed.start(done)
                if stopping and done < self.config.steps:
                    display.say(f"stopped after step {done}; the same command with --resume continues")
                    return Outcome(done, False, evaluation, self._speed.median, stop.signal)
        return self._finish(evaluation)

    def _load(self) -> int:
        """Load the last checkpoint; the step to continue from."""
        self.folder.check_same(self.config, self.source.fingerprint)
        latest = self.store.latest()
        if latest is None:
            return 0
        progress = self.store.load(latest, self.plain_model, self.step.optimizer)
        if progress.loss is not None:
            self._evaluated = (progress.step, progress.loss)
        return progress.step

    def _open_files(self, start: int, resume: bool, display: Display) -> None:
        """Begin the run's files, or continue them after `start` steps."""
        if self.processes.is_first:
            if not resume:
                facts = {"name": self.source.name, "fingerprint": self.source.fingerprint}
                self.folder.start(self.config, facts)
            elif (before := self.folder.extend(self.config, start)) is not None:
                rate = learning_rate(self.config, start)
                display.say(
                    f"extended from {before} to {self.config.steps} steps; the learning rate continues at "
                    f"{rate:.3g}, as in a run of {self.config.steps} steps"
                )
            resume_at = start if resume else None
            config, path = self.config.to_dict(), self.folder.path
            trackers = make_trackers(self.config.trackers, path, config, resume_at)
            self._records = Records(self.folder.records, resume_at, trackers)
        self.processes.wait()

    def _first_step(self, batch: StepBatch, rate: float, display: Display) -> StepResult:
        if not self._compiled:
            return self.step(batch, rate)
        required = self.config.compile is True
        return first_compiled_step(self.step, batch, rate, required=required, say=display.say)

    def batch(self, step: int) -> StepBatch:
        """The batch of a step, counted from 0."""
        step = 0 if self.config.overfit_one_batch else step
        batch = StepBatch.of(self.source, step, self.config, self.processes)
        return batch.pinned() if self.processes.device.type == "cuda" else batch

    # --------------------------------------------------------------------- between the steps

    def _due(self, done: int, stopping: bool) -> set[str]:
        config, last = self.config, done == self.config.steps

        def every(steps: int) -> bool:
            return last or (steps > 0 and done % steps == 0)

        due = {"evaluate"} if every(config.eval_every) else set()
        return due | ({"save"} if stopping or every(config.checkpoint_every) else set())

    def _may_stop(self, done: int) -> bool:
        """Several processes ask each other only at the log interval."""
        return self.processes.world == 1 or done % self.config.log_every == 0

    def _record_losses(self, unread: list[_Unread]) -> float:
        """Read the losses from the device, record them, and stop the run if it has diverged."""
        losses = torch.stack([each.result.loss for each in unread]).tolist()
        norms = torch.stack([each.result.gradient_norm for each in unread]).tolist()
        for each, loss, norm in zip(unread, losses, norms, strict=True):
            reason = problem_with(loss, norm, self.config.largest_loss)
            if reason is not None:
                raise self._diverged(each.step, reason)
            self._record(
                {"kind": "train", "step": each.step + 1, "loss": loss, "lr": each.rate, "gradient_norm": norm}
            )
        unread.clear()
        return losses[-1]

    def _diverged(self, step: int, reason: str) -> Diverged:
        """With the gradients of that step, made again: no update has been applied since."""
        self.step.run_eagerly()
        self.step.gradients(self.batch(step))
        return Diverged(step + 1, reason, largest_gradients(self.plain_model), self.store.latest())

    def _pause(self, done: int, due: set[str], display: Display) -> Evaluation | None:
        evaluation = None
        if "evaluate" in due:
            evaluation = self._evaluate(done)
            display.say(
                f"step {done}: {EVALUATED_ON} loss {evaluation.loss:.4f}, accuracy {evaluation.accuracy:.3f}"
            )
            if done == self.config.steps:
                evaluation = self._evaluate_finally(evaluation)
        if self._records is not None:
            self._records.flush()
        if "save" in due:
            step, loss = self._evaluated or (0, None)
            progress = Progress(done, loss if step == done else None, self.source.fingerprint)
            self.store.save(progress, self.plain_model, self.step.optimizer)
        return evaluation

    def _record(self, record: dict[str, Any]) -> None:
        if self._records is not None:
            self._records.write(record)

    # ---------------------------------------------------------------------------- evaluation

    def _evaluate(self, done: int) -> Evaluation:
        found = self._on_held_out(EVALUATED_ON, self.config.eval_rows)
        self._evaluated = (done, found.loss)
        self._record({"kind": EVALUATED_ON, "step": done, **_figures(found)})
        return found

    def _evaluate_finally(self, last: Evaluation | None) -> Evaluation:
        """At the end; `last` is the evaluation of the same weights during training."""
        config = self.config
        rows = config.eval_rows if config.test_rows is None else config.test_rows or None
        same = (EVALUATED_ON, config.eval_rows) == (FINALLY_EVALUATED_ON, rows)
        found = last if last is not None and same else self._on_held_out(FINALLY_EVALUATED_ON, rows)
        final_ = {"kind": "final", "step": config.steps, **_figures(found)}
        self._record({**final_, "loss_by_position": found.loss_by_position})
        return found

    def _on_held_out(self, split: str, rows: int | None) -> Evaluation:
        with self.step.autocast():
            if self.config.overfit_one_batch:
                batches = iter(self.batch(0).parts)
            else:
                batches = held_out_batches(self.source, split, rows, self.config, self.processes)
            return evaluate(self.objective, batches, self.processes, self.source.length)

    # ------------------------------------------------------------------------------- the end

    def _finish(self, evaluation: Evaluation | None) -> Outcome:
        """Save what is not saved yet: the run may have been killed here before."""
        steps, summary = self.config.steps, self.folder.read_summary()
        if evaluation is None:
            evaluation = self._recorded_evaluation() or self._evaluate_finally(None)
        if summary.get("step") == steps and self.folder.model.is_dir():
            return Outcome(steps, True, evaluation, summary["tokens_per_second"])
        self._save_model()
        outcome = Outcome(steps, True, evaluation, self._speed.median)
        if self.processes.is_first:
            self._write_summary(outcome, evaluation)
        self.processes.wait()
        return outcome

    def _recorded_evaluation(self) -> Evaluation | None:
        """The final evaluation of a run that had ended before."""
        if not self.folder.records.is_file():
            return None
        for record in reversed(read_records(self.folder.records)):
            if record["kind"] == "final" and record["step"] == self.config.steps:
                return Evaluation(
                    record["loss"], record["tokens"], record["accuracy"], record["loss_by_position"]
                )
        return None

    def _save_model(self) -> None:
        """The final weights as an ordinary model folder, and the adapters as PEFT has them."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        if self.adapters is not None:
            if self.processes.is_first:
                save_adapters(self.adapters, self.folder.adapter)
            self.adapters.merge_and_unload()
        weights = get_model_state_dict(self.plain_model, options=options)
        if self.processes.is_first:
            save_model(self.plain_model, weights, self.source, self.folder.model)
        self.processes.wait()

    def _write_summary(self, outcome: Outcome, found: Evaluation) -> None:
        """One row of a table of runs; speeds are in no record, so that records are the same every time."""
        cuda = self.processes.device.type == "cuda"
        summary = {
            "step": outcome.step,
            "test_loss": found.loss,
            "perplexity": found.perplexity,
            "accuracy": found.accuracy,
            "tokens": found.tokens,
            "parameters": sum(p.numel() for p in self.plain_model.parameters()),
            "tokens_per_second": outcome.tokens_per_second,
            "flops_per_token": flops_per_token(
                self.plain_model, model_config(self.config, self.source), self.source.length
            ),
            "compiled": self.step.is_compiled,
            "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        }
        write_json(self.folder.summary, summary)


def _figures(found: Evaluation) -> dict[str, Any]:
    return {
        "loss": found.loss,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "tokens": found.tokens,
    }


@final
class _Speed:
    """Tokens per second between two readings of the losses; evaluations and the first step are left out."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._laps: list[float] = []
        self._step, self._since = 0, 0.0

    def start(self, step: int) -> None:
        self._step, self._since = step, time.perf_counter()

    def lap(self, step: int) -> float:
        """Since the last start or lap."""
        if step > self._step:
            seconds = time.perf_counter() - self._since
            self._laps.append((step - self._step) * self._tokens_per_step / seconds)
            self.start(step)
        return self._laps[-1] if self._laps else 0.0

    @property
    def median(self) -> float:
        """Of all laps."""
        return statistics.median(self._laps) if self._laps else 0.0


@final
class _StopRequest:
    """SIGTERM and Ctrl-C ask the loop to save and end; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal is not None

    def __enter__(self) -> _StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._ask) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *problem: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        with contextlib.suppress(OSError):  # os.write, since a signal may come in the middle of a print
            os.write(sys.stderr.fileno(), b"\nstopping after this step; Ctrl-C again stops at once\n")
