"""The training loop, and `train`, which runs it on a config and a folder.

The batch of a step is a function of seed and step, so a run that was killed continues bit for bit.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from maclaurin.data.source import Source
from maclaurin.data.splits import TEST, VALIDATION
from maclaurin.errors import InputError
from maclaurin.plain_data import write_json
from maclaurin.progress_bar import Display, TerminalDisplay
from maclaurin.stop_request import StopRequest
from maclaurin.training.batches import Prefetch, StepBatch, open_data
from maclaurin.training.checkpoint import CheckpointStore, Progress
from maclaurin.training.compiling import end_compile_workers, first_compiled_step, is_compiled
from maclaurin.training.config import TrainConfig
from maclaurin.training.estimate import flops_per_token
from maclaurin.training.losses import Evaluation, evaluate, objective_of
from maclaurin.training.model import (
    model_config,
    require_model_settings,
    save_adapters,
    save_model,
    start_as_softmax,
    starting_model,
    with_adapters,
)
from maclaurin.training.optimizer_step import (
    Diverged,
    OptimizerStep,
    StepResult,
    largest_gradients,
    learning_rate,
    problem_with,
)
from maclaurin.training.processes import Processes, join, leave
from maclaurin.training.run_folder import Records, RunFolder, read_records
from maclaurin.training.trackers import make_trackers, require_trackers

STOPPING = "stopping after this step; Ctrl-C again stops at once"


def train(config: TrainConfig, out: Path, *, resume: bool = False, display: Display | None = None) -> Outcome:
    """Train in the folder `out`; with `resume`, from the last complete checkpoint there."""
    RunFolder(out).require(resume=resume)
    require_trackers(config.trackers)
    require_model_settings(config)
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
    validation: Evaluation | None  # the last one
    test: Evaluation | None  # of a finished run only, and not without `test` in its config
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
    """Trains one run, from its first step or its last checkpoint to its end."""

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
        if config.equal_start:
            start_as_softmax(self.plain_model, source.train_batch(0, config.batch_size).tokens, config.seed)
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
                shown = self.processes.is_first
                display = TerminalDisplay(title, self.config.steps, start) if shown else Display()
            self.objective.train()
            try:
                return self._run(start, resume, display)
            finally:
                if self._records is not None:
                    self._records.close()
                if self._compiled:
                    end_compile_workers()

    def _run(self, start: int, resume: bool, display: Display) -> Outcome:
        with (
            display,
            StopRequest("SIGTERM", "SIGINT", message=STOPPING) as stop,
            Prefetch(self.batch, start, self.config.steps) as batches,
        ):
            validation, test = None, None
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
                    display.step(done, self._record_losses(unread, display), self._speed.lap(done))
                if due:
                    validation = self._evaluate(done, display) if "evaluate" in due else validation
                    if done == self.config.steps:
                        validation, test = self._evaluate_finally(validation)
                    if "save" in due:
                        self._save(done)
                    self._speed.start(done)
                if stopping and done < self.config.steps:
                    display.say(f"stopped after step {done}; resume the run to continue")
                    return Outcome(done, False, validation, None, self._speed.median, stop.signal)
        return self._finish(validation, test)

    def _load(self) -> int:
        """Load the last checkpoint; the step to continue from."""
        self.folder.check_same(self.config, self.source.fingerprint)
        latest = self.store.latest()
        if latest is None:
            return 0
        progress = self.store.load(latest, self.plain_model, self.step.optimizer)
        if progress.validation_loss is not None:
            self._evaluated = (progress.step, progress.validation_loss)
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
        """Several processes synchronise this only at the log interval."""
        return self.processes.world == 1 or done % self.config.log_every == 0

    def _record_losses(self, unread: list[_Unread], display: Display) -> float:
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
            display.recorded(each.step + 1, loss)
        unread.clear()
        return losses[-1]

    def _diverged(self, step: int, reason: str) -> Diverged:
        """The error, with the gradients of that step computed again: no update has been applied since."""
        self.step.run_eagerly()
        self.step.gradients(self.batch(step))
        return Diverged(step + 1, reason, largest_gradients(self.plain_model), self.store.latest())

    def _save(self, done: int) -> None:
        """Flush the records first, so that none before a checkpoint can be missing."""
        if self._records is not None:
            self._records.flush()
        step, loss = self._evaluated or (0, None)
        progress = Progress(done, loss if step == done else None, self.source.fingerprint)
        self.store.save(progress, self.plain_model, self.step.optimizer)

    def _record(self, record: dict[str, Any]) -> None:
        if self._records is not None:
            self._records.write(record)

    # ---------------------------------------------------------------------------- evaluation

    def _evaluate(self, done: int, display: Display) -> Evaluation | None:
        """Evaluate on validation data, if any: always the same rows, so that losses are comparable."""
        found = self._on_held_out(VALIDATION, self.config.eval_rows)
        if found is None:
            return None
        self._evaluated = (done, found.loss)
        self._record({"kind": VALIDATION, "step": done, **_figures(found)})
        display.say(f"step {done}: validation loss {found.loss:.4f}, accuracy {found.accuracy:.3f}")
        return found

    def _evaluate_finally(self, last: Evaluation | None) -> tuple[Evaluation | None, Evaluation | None]:
        """(validation, test) after the last step. `last` is the validation of that step, if it was done.

        Without `test` in the config, the test data are not used.
        """
        config = self.config
        rows = config.eval_rows if config.final_rows is None else config.final_rows or None
        if last is None or rows != config.eval_rows:
            last = self._on_held_out(VALIDATION, rows)
        if last is not None:
            self._record({"kind": "final-validation", "step": config.steps, **_figures(last)})
        test = self._on_held_out(TEST, rows) if config.test else None
        if test is not None:
            final_ = {"kind": "final", "step": config.steps, **_figures(test)}
            self._record({**final_, "loss_by_position": test.loss_by_position})
        return last, test

    def _on_held_out(self, split: str, rows: int | None) -> Evaluation | None:
        """The first `rows` rows of a split, or all of them; None where the split is empty."""
        with self.step.autocast():
            if self.config.overfit_one_batch:
                batches = iter(self.batch(0).parts)
            else:
                share = {"rank": self.processes.rank, "world": self.processes.world}
                batches = self.source.held_out_batches(split, self.config.batch_size, rows, **share)
            return evaluate(self.objective, batches, self.processes, self.source.length)

    # ------------------------------------------------------------------------------- the end

    def _finish(self, validation: Evaluation | None, test: Evaluation | None) -> Outcome:
        """Write the final files that are missing: the run may have been killed here before."""
        steps, summary = self.config.steps, self.folder.read_summary()
        if (test if self.config.test else validation) is None:
            validation, test = self._recorded_evaluations() or self._evaluate_finally(None)
        is_saved = summary.get("step") == steps and self.folder.model.is_dir()
        if self.processes.any(self.processes.is_first and is_saved):
            return Outcome(steps, True, validation, test, summary["tokens_per_second"])
        self._save_model()
        if self.processes.is_first:
            self._write_summary(validation, test)
        self.processes.wait()
        return Outcome(steps, True, validation, test, self._speed.median)

    def _recorded_evaluations(self) -> tuple[Evaluation | None, Evaluation | None] | None:
        """The final evaluations of a run that was finished earlier."""
        if not self.folder.records.is_file():
            return None
        lines = {r["kind"]: r for r in read_records(self.folder.records) if r["step"] == self.config.steps}
        validation, test = (
            Evaluation(line["loss"], line["tokens"], line["accuracy"], line.get("loss_by_position", []))
            if (line := lines.get(kind)) is not None
            else None
            for kind in ("final-validation", "final")
        )
        return None if (test if self.config.test else validation) is None else (validation, test)

    def _save_model(self) -> None:
        """Save the final weights as an ordinary model folder, and the adapters in the format of PEFT."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        if self.adapters is not None:
            if self.processes.is_first:
                save_adapters(self.adapters, self.folder.adapter)
            self.adapters.merge_and_unload()
        weights = get_model_state_dict(self.plain_model, options=options)
        if self.processes.is_first:
            save_model(self.plain_model, weights, self.source, self.folder.model)
        self.processes.wait()

    def _write_summary(self, validation: Evaluation | None, test: Evaluation | None) -> None:
        """Write summary.json. Speeds are only here, so that records are the same every time."""
        cuda = self.processes.device.type == "cuda"
        summary = {
            "step": self.config.steps,
            "validation_loss": validation.loss if validation else None,
            "validation_tokens": validation.tokens if validation else None,
            "test_loss": test.loss if test else None,
            "perplexity": test.perplexity if test else None,
            "accuracy": test.accuracy if test else None,
            "tokens": test.tokens if test else None,
            "parameters": sum(p.numel() for p in self.plain_model.parameters()),
            "tokens_per_second": self._speed.median,
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
        """Tokens per second since the last start or lap."""
        if step > self._step:
            seconds = time.perf_counter() - self._since
            self._laps.append((step - self._step) * self._tokens_per_step / seconds)
            self.start(step)
        return self._laps[-1] if self._laps else 0.0

    @property
    def median(self) -> float:
        """The median of all laps."""
        return statistics.median(self._laps) if self._laps else 0.0
