"""What a run starts from: random weights of a size, or the weights of a model folder."""

from __future__ import annotations

from pathlib import Path

from maclaurin.data.source import Source
from maclaurin.errors import InputError
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, size_named
from maclaurin.models.loading import load_model
from maclaurin.training.config import TrainConfig
from maclaurin.training.lora import with_adapters

#: tokens per row of a run that starts from a model and does not say
LENGTH_OF_STARTED = 1024


def model_config(config: TrainConfig, source: Source) -> MaclaurinConfig:
    """The Hugging Face configuration of a run."""
    if config.start is not None:
        return _config_of(config.start)
    attention = config.attention[0] if len(config.attention) == 1 else list(config.attention)
    return MaclaurinConfig.of_size(
        size_named(config.size),
        attention,
        source.vocab_size,
        num_key_value_heads=config.kv_heads,
        initialization=config.initialization,
    )


def row_length(config: TrainConfig) -> int:
    """Tokens per row."""
    if config.length is not None:
        return config.length
    return size_named(config.size).length if config.start is None else LENGTH_OF_STARTED


def starting_model(config: TrainConfig, source: Source) -> MaclaurinForCausalLM:
    """The model before its first step, on the CPU; torch's generator must be seeded."""
    if config.start is None:
        return MaclaurinForCausalLM(model_config(config, source))
    model, _ = load_model(config.start)
    if source.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the data have {source.vocab_size} tokens and the model in {config.start} knows "
            f"{model.config.vocab_size}: use its own tokenizer, --tokenizer hf:{config.start}."
        )
    if config.lora:
        if config.parallel == "fsdp":
            raise InputError("lora and parallel=fsdp do not go together here: use parallel=ddp.")
        with_adapters(model, config.lora)
    return model


def _config_of(start: str) -> MaclaurinConfig:
    folder = Path(start) / "model" if (Path(start) / "model").is_dir() else Path(start)
    if not (folder / "config.json").is_file():
        raise InputError(f"start: {start} holds no model; make one with 'maclaurin convert'.")
    return MaclaurinConfig.from_pretrained(folder)
