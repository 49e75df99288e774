"""Train a converted model to match each layer's attention output, then the original's predictions, then text.

These are ordinary training runs under DIR/recovery, so they resume where they stopped.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from maclaurin.conversion.conversion_record import Recovery
from maclaurin.files import new_file
from maclaurin.progress_bar import Display
from maclaurin.training.config import TrainConfig, config_from
from maclaurin.training.trainer import Outcome, train


def stages_of(recovery: Recovery, model: Path, teacher: str) -> list[tuple[str, TrainConfig]]:
    """The runs, in order; each starts from the model of the one before."""
    common: dict[str, Any] = {
        "data": recovery.data,
        "mix": recovery.mix,
        "reach": recovery.reach,
        "tokenizer": f"hf:{model}",
        "length": recovery.length,
        "batch_size": recovery.batch_size,
        "accumulate": recovery.accumulate,
        "lora": recovery.lora,
        "precision": recovery.precision,
        "device": recovery.device,
        "seed": recovery.seed,
        "eval_every": 0,
        "eval_rows": 64,
        "weight_decay": 0.0,
    }
    first = model / "recovery" / "match-attention"
    stages = []
    start = model
    if recovery.match_steps:
        match = {"objective": "match-attention", "teacher": teacher, "start": str(start)}
        stages.append((first.name, _stage(common, match, recovery.match_steps, recovery.match_lr)))
        start = first
    if recovery.kl_steps:
        logits = {
            "objective": "match-logits",
            "teacher": teacher,
            "start": str(start),
            "answer_weight": recovery.answer_weight,
        }
        stages.append(("match-logits", _stage(common, logits, recovery.kl_steps, recovery.text_lr)))
        start = model / "recovery" / "match-logits"
    if recovery.text_steps:
        text = {"start": str(start)}
        stages.append(("next-token", _stage(common, text, recovery.text_steps, recovery.text_lr)))
    return stages


def _stage(common: dict[str, Any], own: dict[str, Any], steps: int, lr: float) -> TrainConfig:
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
    for name, config in stages_of(recovery, model, teacher):
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
