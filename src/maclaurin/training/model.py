"""The model of a run: random or from a model folder, with or without LoRA adapters; saved at the end.

A model with random weights can be scaled so that its attention starts like softmax (`start_as_softmax`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor, nn

from maclaurin.data.recall_rows import MixedRows
from maclaurin.data.source import Source
from maclaurin.data.text_source import TextSource
from maclaurin.data.text_tokenizers import BytePairs, Bytes, HubTokenizer, Tokenizer
from maclaurin.errors import InputError, load_extra
from maclaurin.files import new_folder
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM, save_quietly, size_named
from maclaurin.models.model_folder import (
    as_fast_tokenizer,
    byte_tokenizer,
    end_texts_with,
    load_model,
    save_tokenizer,
)
from maclaurin.training.config import TrainConfig

#: default number of tokens per row for a run that starts from a model folder
DEFAULT_FINETUNE_LENGTH = 1024
#: the matrices that LoRA adapts
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: α/r, the factor of an adapter's product
ADAPTER_SCALE = 2


# ------------------------------------------------------------------------------------ before training


def require_model_settings(config: TrainConfig) -> None:
    """Raise for a spec, size or number of heads that cannot work; needs no data."""
    if config.start is None:
        _config_of_size(config, vocab_size=2).layer_attention()  # reads every spec


def model_config(config: TrainConfig, source: Source) -> MaclaurinConfig:
    """The Hugging Face configuration of a run."""
    if config.start is not None:
        return _config_of(config.start)
    return _config_of_size(config, source.vocab_size)


def _config_of_size(config: TrainConfig, vocab_size: int) -> MaclaurinConfig:
    size = size_named(config.size)
    if config.kv_heads is not None and (config.kv_heads < 1 or size.heads % config.kv_heads):
        fitting = ", ".join(str(n) for n in range(1, size.heads + 1) if size.heads % n == 0)
        raise InputError(
            f"kv_heads={config.kv_heads} does not divide the {size.heads} query heads of size {size.name}: "
            f"use one of {fitting}."
        )
    attention = config.attention[0] if len(config.attention) == 1 else list(config.attention)
    return MaclaurinConfig.of_size(
        size,
        attention,
        vocab_size,
        num_key_value_heads=config.kv_heads,
        initialization=config.initialization,
    )


def row_length(config: TrainConfig) -> int:
    """Tokens per row."""
    if config.length is not None:
        return config.length
    return size_named(config.size).length if config.start is None else DEFAULT_FINETUNE_LENGTH


def starting_model(config: TrainConfig, source: Source) -> MaclaurinForCausalLM:
    """The model before its first step, on the CPU; torch's generator must be seeded."""
    if config.start is None:
        return MaclaurinForCausalLM(model_config(config, source))
    model, _ = load_model(config.start)
    if source.vocab_size > model.config.vocab_size:
        raise InputError(
            f"the data have a vocabulary of {source.vocab_size} tokens and the model in {config.start} one "
            f"of {model.config.vocab_size}: give the model's own as `tokenizer`: hf:{config.start}."
        )
    return model


def _config_of(start: str) -> MaclaurinConfig:
    folder = Path(start) / "model" if (Path(start) / "model").is_dir() else Path(start)
    if not (folder / "config.json").is_file():
        raise InputError(f"start: {start} holds no model; make one with 'maclaurin convert'.")
    return MaclaurinConfig.from_pretrained(folder)


# ----------------------------------------------------------------------------------------------- LoRA


def with_adapters(model: MaclaurinForCausalLM, rank: int, start: str | None = None) -> Any:
    """Freeze the model and add LoRA adapters to its projections in place; returns the PeftModel.

    Every other module of attention (gates, norms of queries and keys, convolutions) is trained in full and
    saved with the adapters.
    """
    peft = load_extra("peft", "lora", "`lora`")
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=ADAPTER_SCALE * rank,
        target_modules=list(ADAPTED),
        modules_to_save=_trained_in_full(model) or None,
    )
    adapters = peft.get_peft_model(model, settings)
    # PEFT writes the name of the model into the settings, and warns if another one is there before
    settings.base_model_name_or_path = settings.base_model_name_or_path or start
    return adapters


def _trained_in_full(model: MaclaurinForCausalLM) -> list[str]:
    """Names of the modules of attention that have parameters and are not projections."""
    children = [
        item
        for module in model.modules()
        if isinstance(getattr(module, "self_attn", None), nn.Module)
        for item in module.self_attn.named_children()  # type: ignore[union-attr]
    ]
    return sorted({name for name, child in children if name not in ADAPTED and list(child.parameters())})


# ------------------------------------------------------------------------------------- after training


def save_adapters(adapters: Any, folder: Path) -> None:
    """Save in the format of PEFT: PeftModel.from_pretrained(model, folder) loads them."""
    with _readable_folder(folder) as partial:
        adapters.save_pretrained(partial)


def save_model(
    model: MaclaurinForCausalLM, weights: dict[str, Any] | None, source: Source, folder: Path
) -> None:
    """Write weights, configuration and tokenizer; replaces the folder."""
    with _readable_folder(folder) as partial:
        _save_tokenizer(source, model, partial)
        save_quietly(model, partial, weights)


@contextmanager
def _readable_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which replaces `folder` at the end; its file permissions follow the umask."""
    with new_folder(folder) as partial:
        yield partial
        own = partial / ".mode"
        own.touch()
        mode = own.stat().st_mode & 0o777  # safetensors makes files readable only by the owner
        own.unlink()
        for file in partial.rglob("*"):
            if file.is_file():
                file.chmod(mode)


def _save_tokenizer(source: Source, model: MaclaurinForCausalLM, folder: Path) -> None:
    """Write the tokenizer and set the model's end-of-text token; synthetic tasks have neither."""
    if not isinstance(source, TextSource | MixedRows):
        return
    tokenizer = _for_transformers(source.tokenizer)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)
        end_texts_with(model, source.tokenizer.separator)


def _for_transformers(tokenizer: Tokenizer) -> Any | None:
    if isinstance(tokenizer, Bytes):
        return as_fast_tokenizer(byte_tokenizer())
    if isinstance(tokenizer, BytePairs):
        return as_fast_tokenizer(tokenizers.Tokenizer.from_str(tokenizer.serialized))
    return tokenizer.transformers_tokenizer if isinstance(tokenizer, HubTokenizer) else None


# ------------------------------------------------------------------------------------------ equal start


#: rows, and tokens per row, on which the scale of a layer's output is measured
SCALE_ROWS, SCALE_TOKENS = 4, 512
SOFTMAX = "exp/sum"


@torch.no_grad()
def start_as_softmax(model: MaclaurinForCausalLM, tokens: Tensor, seed: int) -> None:
    """Scale the output projections so that every attention adds as much to the residual stream as softmax.

        W ← W · rms(softmax's W y) / rms(W y)       W the output projection of a layer, y what it projects

    RMS norm is L2 norm times √e, and unnormalised weights grow with the text: two attentions may differ only
    in scale at the start, and then a comparison after a few hundred steps shows little else. The factor of
    each layer is measured on a few rows [B, T] of the training text, from the first layer to the last,
    relative to a softmax model with the same settings and seed.
    """
    tokens = tokens[:SCALE_ROWS, :SCALE_TOKENS]
    config = MaclaurinConfig.from_dict({**model.config.to_dict(), "attention": SOFTMAX})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        softmax = MaclaurinForCausalLM(config)
    sizes = _sizes_of_outputs(softmax, tokens)
    hooks = [
        projection.register_forward_hook(_rescale(size))
        for projection, size in zip(_projections(model), sizes, strict=True)
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()


def _projections(model: MaclaurinForCausalLM) -> list[nn.Linear]:
    return [layer.self_attn.o_proj for layer in model.model.layers]  # type: ignore[union-attr, misc]


def _sizes_of_outputs(model: MaclaurinForCausalLM, tokens: Tensor) -> list[float]:
    """The rms of what each layer's attention adds to the residual stream."""
    found: list[float] = []

    def note(module: nn.Module, given: object, output: Tensor) -> None:
        found.append(float(_rms(output)))

    hooks = [projection.register_forward_hook(note) for projection in _projections(model)]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return found


def _rescale(size: float):
    def hook(module: nn.Linear, given: object, output: Tensor) -> Tensor:
        factor = size / float(_rms(output).clamp(min=1e-12))
        for parameter in module.parameters():
            parameter.mul_(factor)
        return output * factor

    return hook


def _rms(u: Tensor) -> Tensor:
    return u.float().square().mean().sqrt()
