"""Speed and memory of a converted model and its original at long context: reading time, tokens/s, bytes.

    python benchmarks/conversion.py --device cuda [--contexts 1024,4096,16384,65536]

A model of SmolLM2-135M's shape with random weights, on which neither speed nor memory depends. The original
runs in transformers with its own attention, the conversion has the same weights and another attention. Both
run step by step and from a recorded step (a CUDA graph): the conversion as in `maclaurin generate`, the
original with transformers' StaticCache, whose length is fixed in advance. Results are added to those of other
devices in benchmarks/results/conversion.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import stamp
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from maclaurin.models.cache import MaclaurinCache
from maclaurin.models.generating import Generation, Sampling
from maclaurin.models.llama_like import adopted
from maclaurin.models.recorded_step import cuda_graph

RESULTS = Path(__file__).parent / "results" / "conversion.json"
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
}


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    shape = SHAPE | ({"num_hidden_layers": options.layers} if options.layers else {})
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        original: Any = LlamaForCausalLM(LlamaConfig(**shape))
    original = original.to(dtype).eval()
    contexts = [int(context) for context in options.contexts.split(",")]
    text = torch.randint(0, shape["vocab_size"], (1, max(contexts)), device=options.device)
    found = {"original": _measured(original, DynamicCache, text, contexts, options)}
    for attention in options.attention:
        model: Any = adopted(original, attention)
        found[attention] = _measured(model, lambda m=model: MaclaurinCache(m.config), text, contexts, options)
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known[options.device] = {"machine": stamp(), "shape": shape, "dtype": str(dtype), "found": found}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Speed and memory of a conversion against context.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--contexts", default="1024,4096,16384,65536")
    parser.add_argument(
        "--attention", nargs="+", default=["taylor(2,about=mean)+window(64,sinks=1)/sum", "taylor(2)/sum"]
    )
    parser.add_argument("--piece", type=int, default=4096, help="tokens read at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate, timed")
    parser.add_argument("--layers", type=int, help="fewer layers than SmolLM2 has")
    return parser.parse_args()


@torch.no_grad()
def _measured(
    model: Any, new_cache: Callable[[], Any], text: Tensor, contexts: list[int], options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Figures by context length; one text is continued, so that nothing is read twice."""
    cache, found, seconds = new_cache(), {}, 0.0
    reaches = list(itertools.pairwise([0, *sorted(contexts)]))
    warm = new_cache()  # programs are compiled, memory is allocated
    for size in dict.fromkeys(n for reach in reaches for n in _pieces(*reach, options.piece)):
        _read(model, warm, text[:, :size])
    for start, context in reaches:
        begin = _now(options.device)
        for piece in text[:, start:context].split(_pieces(start, context, options.piece), dim=1):
            _read(model, cache, piece)
        seconds += _now(options.device) - begin
        speed = _speed(model, copy.deepcopy(cache), text, options)
        found[str(context)] = {
            "seconds_to_read": seconds,
            "cache_bytes": _bytes(cache),
            "tokens_per_second": speed,
        }
        if options.device == "cuda":
            recorded = _recorded_speed(model, cache, context, options)
            found[str(context)]["tokens_per_second_recorded"] = recorded
        print(type(model).__name__, context, found[str(context)], flush=True)
    return found


def _pieces(start: int, stop: int, most: int) -> list[int]:
    """Sizes of the pieces to read from start to stop."""
    return [min(most, stop - at) for at in range(start, stop, most)]


def _speed(model: Any, cache: Any, text: Tensor, options: argparse.Namespace) -> float:
    for t in range(4):
        _read(model, cache, text[:, t : t + 1])
    begin = _now(options.device)
    for t in range(options.tokens):
        _read(model, cache, text[:, t : t + 1])
    return options.tokens / (_now(options.device) - begin)


def _recorded_speed(model: Any, cache: Any, context: int, options: argparse.Namespace) -> float | None:
    tokens = 8 * options.tokens
    if isinstance(cache, MaclaurinCache):
        generation = _recorded(model, cache.fork())
        step = None if generation._recorded is None else generation.step
    else:
        step = _recorded_step_of_original(model, context, tokens)
    if step is None:
        return None
    begin = _now(options.device)
    for _ in range(tokens):
        step()
    return tokens / (_now(options.device) - begin)


def _recorded(model: Any, cache: MaclaurinCache) -> Generation:
    """A text whose steps are recorded, if they can be."""
    generation = Generation(model, cache, Sampling(temperature=0))
    generation.add(torch.zeros(1, 1, dtype=torch.long))
    for _ in range(16):  # recorded after some steps
        generation.step()
    return generation


def _recorded_step_of_original(model: Any, context: int, tokens: int) -> Callable[[], Any] | None:
    """A greedy step as a CUDA graph. The speed depends on the size of the cache, not on its content."""
    cache: Any = StaticCache(config=model.config, max_cache_len=context + tokens + 16)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    _read(model, cache, token)
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)

    def step() -> None:
        out = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

    try:
        return cuda_graph(step)
    except RuntimeError as error:
        print(f"the original's step cannot be recorded here: {error}", flush=True)
        return None


def _read(model: Any, cache: Any, tokens: Tensor) -> None:
    model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _bytes(cache: Any) -> int:
    if isinstance(cache, MaclaurinCache):
        return cache.nbytes
    return sum(u.nbytes for layer in cache.layers for u in (layer.keys, layer.values))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
