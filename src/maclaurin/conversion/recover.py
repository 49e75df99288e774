"""Train a converted model to match each layer's attention output, then the original's predictions, then text.

These are ordinary training runs under DIR/recovery, so they resume where they stopped.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from maclaurin.files import new_file
from maclaurin.progress_bar import Display
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.trainer import Outcome, train


@final
@dataclass(frozen=True)
class Recovery:
    """Settings of the training: steps of each stage, data, learning rates."""

    match_steps: int = 0
    text_steps: int = 0
    data: str = "stdlib"
    lora: int = 0
    length: int = 1024
    batch_size: int = 8
    match_lr: float = 1e-3
    text_lr: float = 1e-4
    precision: str = "fp32"
    device: str = "auto"
    seed: int = 0
    kl_steps: int = 0
    #: share of rows with facts and questions, or with copies (data/recall_rows.py); largest distance of facts
    mix: float = 0.0
    reach: int | None = None
    #: weight of the mean loss of answers; the mean divergence from the original's predictions has weight 1
    answer_weight: float = 0.1
    #: parts of a batch that are computed one after the other, to save memory
    accumulate: int = 1

    @property
    def has_steps(self) -> bool:
        """Whether there is anything to train."""
        return bool(self.match_steps or self.kl_steps or self.text_steps)

    def stages(self, model: Path, teacher: str) -> list[tuple[str, TrainConfig]]:
        """The runs, in order; each starts from the model of the one before."""
        common: dict[str, Any] = {
            "data": self.data,
            "mix": self.mix,
            "reach": self.reach,
            "tokenizer": f"hf:{model}",
            "length": self.length,
            "batch_size": self.batch_size,
            "accumulate": self.accumulate,
            "lora": self.lora,
            "precision": self.precision,
            "device": self.device,
            "seed": self.seed,
            "eval_every": 0,
            "eval_rows": 64,
            "weight_decay": 0.0,
        }
        first = model / "recovery" / "match-attention"
        stages = []
        start = model
        if self.match_steps:
            match = {"objective": "match-attention", "teacher": teacher, "start": str(start)}
            stages.append((first.name, self._stage(common, match, self.match_steps, self.match_lr)))
            start = first
        if self.kl_steps:
            logits = {
                "objective": "match-logits",
                "teacher": teacher,
                "start": str(start),
                "answer_weight": self.answer_weight,
            }
            stages.append(("match-logits", self._stage(common, logits, self.kl_steps, self.text_lr)))
            start = model / "recovery" / "match-logits"
        if self.text_steps:
            text = {"start": str(start)}
            stages.append(("next-token", self._stage(common, text, self.text_steps, self.text_lr)))
        return stages

    def _stage(self, common: dict[str, Any], own: dict[str, Any], steps: int, lr: float) -> TrainConfig:
        schedule = {
            "steps": steps,
            "lr": lr,
            "warmup": max(1, steps // 20),
            "checkpoint_every": max(1, steps // 5),
        }
        return config_from({**common, **own, **schedule})


def recover(model: Path, teacher: str, recovery: Recovery, *, progress: bool = True) -> list[Outcome]:
    """Run the stages that are not done yet, then replace the model's weights by the last ones."""
    outcomes = []
    last = None
    for name, config in recovery.stages(model, teacher):
        folder = model / "recovery" / name
        resume, display = (folder / "config.json").exists(), None if progress else Display()
        outcome = train(config, folder, resume=resume, display=display)
        outcomes.append(outcome)
        if not outcome.finished:
            return outcomes
        last = folder
    if last is not None:
        _copy_weights(last / "model", model)
    return outcomes


def _copy_weights(trained: Path, model: Path) -> None:
    for file in trained.glob("*.safetensors*"):
        with new_file(model / file.name) as temporary:
            shutil.copy2(file, temporary)
