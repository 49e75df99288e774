"""Every setting of a run, in one flat record: the same keys in TOML, config.json and on the command line."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from maclaurin.data.recall_rows import require_mixable
from maclaurin.data.splits import usual_fraction
from maclaurin.errors import InputError
from maclaurin.plain_data import to_plain
from maclaurin.wording import did_you_mean


def _key(default: Any, help_: str) -> Any:
    return field(default=default, metadata={"help": help_})


@final
@dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run."""

    attention: tuple[str, ...] = _key(
        ("exp/sum",), "Attention spec or catalogue name; repeat it to give one per layer."
    )
    size: str = _key("nano", "Model size: pico, nano, 5m, micro, mini, 60m, small or large.")
    kv_heads: int | None = _key(None, "Key-value heads. By default as many as query heads.")
    initialization: str = _key("scaled", "scaled (normal, 0.02), or torch for the defaults of nn.Linear.")
    equal_start: bool = _key(
        False, "Scale output projections so that attention starts with the output size of softmax."
    )
    start: str | None = _key(None, "Model folder to start from. By default weights are random.")
    objective: str = _key("next-token", "next-token; match-attention or match-logits: imitate a teacher.")
    teacher: str | None = _key(None, "Model folder that match-attention or match-logits imitates.")
    lora: int = _key(0, "Rank of LoRA adapters on the model of --start; 0 trains all weights.")
    data: str = _key("stdlib", "stdlib, a file or folder, hf:NAME:CONFIG, or a task such as mqar:pairs=8.")
    tokenizer: str = _key("bpe:1024", "bytes, bpe:N, or hf:NAME_OR_PATH.")
    length: int | None = _key(None, "Tokens per row. The default depends on the size.")
    rows: str = _key("packed", "packed, or documents for one document per row.")
    cross_documents: bool = _key(True, "Let attention cross the documents of a packed row.")
    mix: float = _key(
        0.0, "Share of training rows with facts and questions, or with repeated passages, in their text."
    )
    reach: int | None = _key(None, "With mix: largest distance of facts, in tokens. By default the length.")
    answer_weight: float = _key(
        0.1, "With mix, match-logits: weight of the mean loss of answers relative to that of all tokens."
    )
    limit_documents: int | None = _key(None, "Use only this many documents. By default all.")
    validation_fraction: float | None = _key(
        None, "Share of the documents to evaluate on during training. By default 0.1 of stdlib, else 0.02."
    )
    test_fraction: float | None = _key(
        None, "Share of the documents for the final evaluation only. By default 0.1 of stdlib, else 0.02."
    )
    steps: int = _key(400, "Optimizer steps; with --resume, a larger number extends the run.")
    batch_size: int = _key(16, "Rows per step, over all processes and accumulated parts.")
    accumulate: int = _key(1, "Gradient accumulation: compute a batch in this many parts, to save memory.")
    lr: float = _key(1e-3, "Peak learning rate.")
    output_lr: float = _key(1.0, "Factor of the learning rate for the output projections of attention.")
    schedule: str = _key("cosine", "Decay of the learning rate: cosine, linear or constant.")
    warmup: int = _key(20, "Steps of linear warm-up.")
    decay_steps: int | None = _key(None, "Step at which the decay ends. By default the last one.")
    final_lr: float = _key(0.1, "Learning rate at the end, relative to the peak.")
    weight_decay: float = _key(0.1, "Weight decay, of matrices only.")
    beta1: float = _key(0.9, "Decay of AdamW's first moment.")
    beta2: float = _key(0.95, "Decay of AdamW's second moment.")
    clip: float | None = _key(1.0, "Gradient norm to clip at; 0 for no clipping.")
    seed: int = _key(0, "Random seed of the weights and of the order of the data.")
    precision: str = _key("fp32", "fp32, or bf16 for mixed precision.")
    compile: bool | None = _key(
        None, "Compile the training step with torch.compile. By default on a GPU only."
    )
    gradient_checkpointing: bool = _key(False, "Recompute activations in the backward pass, to save memory.")
    parallel: str = _key("ddp", "Under torchrun: ddp or fsdp.")
    device: str = _key("auto", "auto, cpu or cuda.")
    eval_every: int = _key(100, "Steps between evaluations; 0 to evaluate only at the end.")
    eval_rows: int | None = _key(None, "Rows per evaluation, including the final ones. By default all.")
    final_rows: int | None = _key(
        None, "Rows of the final evaluations; 0 for all. By default as many as in other evaluations."
    )
    test: bool = _key(True, "Evaluate on the test data after the last step.")
    checkpoint_every: int = _key(100, "Steps between checkpoints; 0 to save only at the end.")
    keep: int = _key(2, "Number of checkpoints to keep in addition to the best.")
    log_every: int = _key(10, "Log interval in steps; the loss of every step is recorded.")
    largest_loss: float = _key(30.0, "Stop the run when the loss exceeds this.")
    overfit_one_batch: bool = _key(
        False, "Train on the first batch only, as a test: its loss should go to 0."
    )
    trackers: tuple[str, ...] = _key((), "Also log to tensorboard or wandb. By default to neither.")

    def replace(self, **changes: Any) -> TrainConfig:
        """The same run with some keys changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return to_plain(self)


#: the paper's optimiser settings (arXiv 2507.23632)
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "lr": 1e-4,
        "schedule": "linear",
        "warmup": 10_000,
        "decay_steps": 1_000_000,
        "final_lr": 0.0,
        "weight_decay": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "clip": None,
        "precision": "bf16",
        "batch_size": 36,
        "steps": 100_000,
        "initialization": "torch",
        "rows": "documents",
    },
}

CHOICES: dict[str, tuple[str, ...]] = {
    "initialization": ("scaled", "torch"),
    "objective": ("next-token", "match-attention", "match-logits"),
    "rows": ("packed", "documents"),
    "schedule": ("cosine", "linear", "constant"),
    "precision": ("fp32", "bf16"),
    "parallel": ("ddp", "fsdp"),
    "device": ("auto", "cpu", "cuda"),
}


def load_config(
    file: Path | None, preset: str | None, given: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Defaults, overridden by `base`, the preset, the file and `given`; unknown keys are errors."""
    values: dict[str, Any] = dict(base or {})
    if preset is not None:
        if preset not in PRESETS:
            raise InputError(f"there is no preset {preset!r}; presets are {', '.join(PRESETS)}.")
        values |= PRESETS[preset]
    if file is not None:
        values |= _read_settings(file)
    values |= given
    return config_from(values)


def config_from(values: Mapping[str, Any]) -> TrainConfig:
    """A checked config from plain values."""
    known = {f.name: f for f in dataclasses.fields(TrainConfig)}
    for name in values:
        if name not in known:
            raise InputError(
                f"there is no key {name!r} in a training config." + did_you_mean(name, list(known))
            )
    _refuse_what_a_start_decides(values)
    checked = {name: _checked(name, known[name], value) for name, value in values.items()}
    config = TrainConfig(**checked)
    _check_numbers(config)
    return _with_fractions(config)


def _with_fractions(config: TrainConfig) -> TrainConfig:
    """The config with numbers for the held-out shares, so that a record states them."""
    usual = usual_fraction(config.data)
    return config.replace(
        validation_fraction=usual if config.validation_fraction is None else config.validation_fraction,
        test_fraction=usual if config.test_fraction is None else config.test_fraction,
    )


def _read_settings(file: Path) -> dict[str, Any]:
    """A TOML file, or the config.json of a run."""
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise InputError(f"there is no config file {file}.") from None
    except IsADirectoryError:
        raise InputError(f"{file} is a folder: give a file, such as {file / 'config.json'}.") from None
    except UnicodeDecodeError as problem:
        raise InputError(
            f"{file} is not UTF-8 text (byte {problem.start}): save it as UTF-8, or give another file."
        ) from None
    except OSError as problem:
        raise InputError(f"{file} cannot be read: {problem.strerror}.") from None
    except tomllib.TOMLDecodeError as problem:
        raise InputError(f"{file} is not TOML: {problem}.") from None
    except json.JSONDecodeError as problem:
        raise InputError(f"{file} is not JSON: {problem}.") from None
    if not isinstance(found, dict):
        raise InputError(f'{file} holds no settings: a JSON object with keys such as "lr" is needed.')
    return found


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "tuple[str, ...]": (str, list, tuple),
}


def _checked(name: str, known: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's type, or an error that says what the key takes."""
    kind = str(known.type)
    base = kind.removesuffix(" | None")
    if value is None:
        if base == kind:
            raise InputError(f"{name} must be {kind}, got nothing.")
        return None
    is_bool_for_number = isinstance(value, bool) and base != "bool"
    if not isinstance(value, _KINDS[base]) or is_bool_for_number:
        raise InputError(f"{name} must be {kind}, got {value!r}.")
    if name in CHOICES and value not in CHOICES[name]:
        raise InputError(f"{name} must be one of {', '.join(CHOICES[name])}, got {value!r}.")
    if isinstance(value, list | tuple):
        return tuple(value)
    if base == "tuple[str, ...]":
        return (value,)
    return float(value) if base == "float" else value


#: settings that a model to start from determines
_OF_RANDOM_WEIGHTS = ("attention", "size", "kv_heads", "initialization", "equal_start")


def _refuse_what_a_start_decides(values: Mapping[str, Any]) -> None:
    if values.get("start") is None:
        if values.get("lora"):
            raise InputError("lora adapts an existing model, and start names none: set start to its folder.")
        return
    defaults = TrainConfig()
    both = [n for n in _OF_RANDOM_WEIGHTS if n in values and values[n] != getattr(defaults, n)]
    if both:
        raise InputError(
            f"a run that starts from {values['start']} takes its {', '.join(both)} from there: leave "
            f"{'it' if len(both) == 1 else 'them'} out, or convert the model first."
        )


def _check_numbers(config: TrainConfig) -> None:
    for name in ("steps", "batch_size", "accumulate", "keep", "log_every"):
        if getattr(config, name) < 1:
            raise InputError(f"{name} must be at least 1, got {getattr(config, name)}.")
    for name in (
        "lr",
        "output_lr",
        "final_lr",
        "weight_decay",
        "warmup",
        "eval_every",
        "checkpoint_every",
        "lora",
        "final_rows",
        "mix",
        "answer_weight",
    ):
        if (getattr(config, name) or 0) < 0:
            raise InputError(f"{name} must not be negative, got {getattr(config, name)}.")
    if config.mix:
        require_mixable(config.mix, config.reach, config.length, config.rows, config.cross_documents)
    if config.batch_size % config.accumulate:
        raise InputError(
            f"a batch of {config.batch_size} rows cannot be computed in {config.accumulate} equal parts: use "
            f"a multiple of {config.accumulate}."
        )
