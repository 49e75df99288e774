"""Tokenizers in Hugging Face's format, saved beside the weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from maclaurin.errors import InputError
from maclaurin.models.modeling import MaclaurinForCausalLM

SEPARATOR = "<|separator|>"


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Token = byte, 256 the separator: byte pairs without pairs."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


def as_fast_tokenizer(tokenizer: tokenizers.Tokenizer) -> PreTrainedTokenizerFast:
    """A fast tokenizer that puts the separator before every text, as in training, and pads on the left."""
    number = tokenizer.token_to_id(SEPARATOR)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{SEPARATOR} $A",
        pair=f"{SEPARATOR} $A $B:1",
        special_tokens=[(SEPARATOR, number)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        padding_side="left",
    )


def named_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """`bytes`, a folder or name that transformers reads, or a tokenizer.json file."""
    if name == "bytes":
        return as_fast_tokenizer(byte_tokenizer())
    path = Path(name).expanduser()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.is_file():
                return PreTrainedTokenizerFast(tokenizer_file=str(path))
            return AutoTokenizer.from_pretrained(str(path) if path.is_dir() else name)
    except Exception as problem:  # missing files, or errors of the Rust library, which are plain Exceptions
        first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise InputError(
            f"the tokenizer {name} cannot be opened ({first[:200]}). Give a folder made by save_pretrained, "
            "a tokenizer.json file, a name on the hub that can be reached, or bytes."
        ) from None


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write it into the model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def end_texts_with(model: MaclaurinForCausalLM, token: int) -> None:
    """Set the token that begins and ends a text, unless the model has one."""
    if model.config.eos_token_id is not None:
        return
    for config in (model.config, model.generation_config):
        if config is not None:
            config.bos_token_id = config.eos_token_id = config.pad_token_id = token


def _letters() -> list[str]:
    """The character for each byte: itself if printable, else one beyond Latin-1."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]
