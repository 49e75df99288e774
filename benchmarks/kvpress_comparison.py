"""Recall at equal bytes, compared with the methods of kvpress: the same questions, the same model.

    # in our environment: an ordinary Llama folder, questions as tokens, and our results on them
    python benchmarks/kvpress_comparison.py folder MODEL HF_FOLDER
    python benchmarks/kvpress_comparison.py questions MODEL questions.json --number 200 --tokens tokens.npz.xz
    python benchmarks/kvpress_comparison.py ours MODEL questions.json ours.json --plans memory.json
    # in a separate environment with kvpress and transformers: the results of its methods
    python benchmarks/kvpress_comparison.py kvpress HF_FOLDER questions.json kvpress.json --share 0.25 0.125
    # both together, for benchmarks/results and for the page (benchmarks/memory_pages.py)
    python benchmarks/kvpress_comparison.py together questions.json kvpress.json ours.json --out together.json

kvpress compresses after the whole prompt was read with full attention. `ours` is measured both ways: pressed
like that, and with the memory limited while reading, which is the harder task. memory.json is the result of
memory.py, whose stage "pressed" chooses plans for 25 % and 12.5 % of the bytes at 1,280 tokens; --attention
takes conversion.json files of `maclaurin convert --memory` instead.

With --piece 32, methods that score keys by themselves (STREAMED) are also limited while reading: kvpress's
DecodingPress compresses to the same number of keys after every 32 tokens, so that at most 32 more are kept.
SnapKV, ExpectedAttention and TOVA are left out: they score by hidden states, of which DecodingPress has only
those of the last steps.

The part for kvpress does not import maclaurin. kvpress 0.5.5 asks for transformers < 5.3; with 5.22 these
methods gave the same log-odds to four digits (two questions, a CPU).
"""

from __future__ import annotations

import argparse
import io
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

#: methods by their class in kvpress
METHODS = (
    "StreamingLLMPress", "KnormPress", "SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KeyDiffPress",
)  # fmt: skip
#: methods whose scores depend on keys and places alone
STREAMED = ("StreamingLLMPress", "KnormPress", "KeyDiffPress")
#: questions between two writings of the results so far
WRITTEN_EVERY = 20
#: number of tokens to read, and of tokens to predict from the compressed cache
CONTEXT, CONTINUATION = 1280, 128


def main() -> None:
    """Run one of the four steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    folder = steps.add_parser("folder")
    folder.add_argument("model", help="a GGUF file or a folder that transformers loads")
    folder.add_argument("out", type=Path)
    asked = steps.add_parser("questions")
    asked.add_argument("model")
    asked.add_argument("out", type=Path)
    asked.add_argument("--distance", type=int, default=1024)
    asked.add_argument("--number", type=int, default=200)
    asked.add_argument("--seed", type=int, default=0, help="differs from the seed for choosing memories")
    asked.add_argument("--tokens", type=Path, help="tokens.npz.xz of carry_memory.py, with texts to continue")
    asked.add_argument("--texts", type=int, default=10, help="number of these texts")
    for name in ("ours", "kvpress"):
        step = steps.add_parser(name)
        step.add_argument("model")
        step.add_argument("questions", type=Path)
        step.add_argument("out", type=Path)
        step.add_argument("--device", default="cpu")
        if name == "ours":
            step.add_argument("--attention", type=Path, nargs="+", default=[], help="conversion.json files")
            step.add_argument("--plans", type=Path, help="memory.json of memory.py, for its plans at 1,280")
            step.add_argument("--rivals", action="store_true", help="with --plans: others of the same bytes")
        else:
            step.add_argument("--share", type=float, nargs="+", default=[0.25, 0.125], help="of the keys")
            step.add_argument("--piece", type=int, default=0, help="also compress after every so many tokens")
        step.add_argument("--limit", type=int, help="ask only this many questions")
    both = steps.add_parser("together")
    both.add_argument("questions", type=Path)
    both.add_argument("results", type=Path, nargs="+")
    both.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = {
        "together": put_together,
        "folder": write_folder,
        "questions": write_questions,
        "ours": ask_ours,
        "kvpress": ask_kvpress,
    }
    run[options.step](options)


def write_folder(options: argparse.Namespace) -> None:
    """The model in fp32, as transformers saves one; a GGUF file's weights are dequantized."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    given = Path(options.model)
    place, more = (given.parent, {"gguf_file": given.name}) if given.suffix == ".gguf" else (given, {})
    model: Any = AutoModelForCausalLM.from_pretrained(str(place), dtype="float32", **more)
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)  # a dequantized model is not saved as long as it is there
    plain = LlamaForCausalLM(LlamaConfig(**settings)).float()
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(str(place), **more).save_pretrained(options.out)


def write_questions(options: argparse.Namespace) -> None:
    """Contexts, prompts and the first token in which the choices differ, as token ids."""
    from maclaurin.conversion.convert_model import load_for_conversion
    from maclaurin.conversion.fact_questions import fact_questions

    _, tokenizer = load_for_conversion(options.model, "cpu")
    questions = fact_questions(tokenizer, [options.distance], options.number, options.seed)
    rows = [
        {
            "context": q.context[0].tolist(),
            "prompt": q.prompt[0].tolist(),
            "choices": list(q.choices),
            "right": q.right,
        }
        for q in questions
    ]
    texts = [] if options.tokens is None else _texts(options.tokens)[: options.texts]
    written = {"distance": options.distance, "questions": rows, "texts": texts}
    options.out.write_text(json.dumps(written) + "\n")


def _texts(tokens: Path) -> list[dict[str, list[int]]]:
    """Texts to continue, from the evaluation rows of benchmarks/carry_memory.py."""
    import lzma

    import numpy as np

    with lzma.open(tokens) as file, np.load(io.BytesIO(file.read())) as found:
        rows = found["evaluation"].astype(int)
    return [
        {"context": row[:CONTEXT].tolist(), "continuation": row[CONTEXT : CONTEXT + CONTINUATION].tolist()}
        for row in rows
    ]


# -------------------------------------------------------------------------------------------- ours


def ask_ours(options: argparse.Namespace) -> None:
    """Measure the original, and each attention while reading and after the prompt was read in full."""
    import torch

    import maclaurin
    from maclaurin.conversion.convert_model import load_for_conversion
    from maclaurin.models import MaclaurinCache, MaclaurinConfig
    from maclaurin.models.modeling import with_attention

    model, _ = load_for_conversion(options.model, options.device)
    given = _given(options)
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}

    @torch.no_grad()
    def answers(rows: list[dict[str, Any]], part: str) -> Iterator[Any]:
        for row in rows:
            cache = MaclaurinCache(cast("MaclaurinConfig", model.config))
            context, more = (torch.tensor([row[name]], device=model.device) for name in ("context", part))
            model(input_ids=context, past_key_values=cache, logits_to_keep=1)
            logits = model(input_ids=more, past_key_values=cache).logits[0]
            yield _kept_of(row, logits)

    def measure(name: str, kind: str) -> None:
        if name in found:
            return
        rows, texts = given["questions"], given["texts"]
        summary = _summary(rows, list(answers(rows, "prompt")), list(answers(texts, "continuation")))
        found[name] = {**summary, "machine": _machine(options.device), "kind": kind}
        _write(options.out, found)

    measure("original", "full softmax")
    for plan in _plans(options):
        if not plan.is_rival:
            with maclaurin.press(model, plan.attention):
                measure(f"{plan.name}, pressed after reading", plan.kind)
        with with_attention(model, plan.attention):
            measure(f"{plan.name}, limited while reading", plan.kind)


class _Plan(NamedTuple):
    """An attention to measure, its name, and the kind of memory as pages name it."""

    attention: list[str]
    name: str
    kind: str
    is_rival: bool = False


def _plans(options: argparse.Namespace) -> Iterator[_Plan]:
    """Every given plan, the rivals last."""
    for file in options.attention:
        written = json.loads(file.read_text())
        choice = written["chosen"]
        best = next(plan for plan in choice["measured"] if plan["name"] == choice["plan"]["name"])
        yield _Plan(written["attention"], _name_of(choice), best["kind"])
    chosen = {} if options.plans is None else json.loads(options.plans.read_text())["chosen"]
    plans = [plan for plan in chosen.values() if plan["budget"]["at"] == CONTEXT]
    for plan in plans:
        yield _Plan(plan["attention"], _name_of(plan), plan["plan"]["kind"])
    for plan in plans if options.rivals else ():
        for name, attention in plan.get("rivals", {}).items():
            yield _Plan(attention, _name_of({**plan, "plan": {"name": name}}), name, is_rival=True)


# ----------------------------------------------------------------------------------------- kvpress


def ask_kvpress(options: argparse.Namespace) -> None:
    """Measure each method at the compression that keeps these shares of the keys.

    While the prompt is read, a press only changes the cache after a layer was computed. So every context is
    read once, and each press makes its own cache from it.
    """
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model: Any = AutoModelForCausalLM.from_pretrained(options.model).to(options.device).eval()
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as a press does it
    given = _given(options)
    presses = {
        f"{method} {share:g}": getattr(kvpress, method)(compression_ratio=1 - share)
        for share in options.share
        for method in METHODS
    }
    for press in presses.values():
        press.post_init_from_model(model)

    def read(context: list[int]) -> dict[str, Any]:
        """A cache for each press, and the full one."""
        caches: dict[str, Any] = {name: DynamicCache() for name in presses}

        def compress(module: Any, _: Any, named: dict[str, Any], output: Any) -> None:
            layer = named["past_key_values"].layers[module.layer_idx]
            for name, press in presses.items():
                kept = press.compress(
                    module, named["hidden_states"], layer.keys, layer.values, output[1], named
                )
                caches[name].update(*kept, module.layer_idx)

        hooks = [
            layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers
        ]
        whole = DynamicCache()
        try:
            ids = torch.tensor([context], device=model.device)
            model(ids, past_key_values=whole, logits_to_keep=1)
        finally:
            for hook in hooks:
                hook.remove()
        streamed = {
            f"{method} limited while reading {share:g}": read_in_pieces(
                model, _decoding_press(method, round(share * len(context))), context, options.piece
            )
            for share in options.share
            for method in (STREAMED if options.piece else ())
        }
        return {"original": whole, **caches, **streamed}

    def answers(rows: list[dict[str, Any]], part: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = defaultdict(list)
        for number, row in enumerate(rows):
            first, more = len(row["context"]), row[part]
            positions = torch.arange(first, first + len(more), device=model.device)[None]
            for name, cache in read(row["context"]).items():
                ids = torch.tensor([more], device=model.device)
                # positions continue after the whole context, however many keys are left
                out = model(ids, past_key_values=cache, position_ids=positions)
                found[name].append(_kept_of(row, out.logits[0]))
            print(f"{part} {number + 1} of {len(rows)}", flush=True)
            if part == "prompt" and (number + 1) % WRITTEN_EVERY == 0:
                some = rows[: number + 1]
                _write(options.out, {name: _summary(some, found[name], []) for name in found})
        return found

    with torch.no_grad():
        asked = answers(given["questions"], "prompt")
        _write(options.out, {name: _summary(given["questions"], asked[name], []) for name in asked})
        losses = answers(given["texts"], "continuation")
    summaries = {name: _summary(given["questions"], asked[name], losses[name]) for name in asked}
    machine = _machine(options.device)
    _write(options.out, {name: {**found, "machine": machine} for name, found in summaries.items()})


def _decoding_press(method: str, keys: int) -> Any:
    """kvpress's own press for decoding, which keeps so many keys by the scores of a method."""
    import kvpress  # pyright: ignore[reportMissingImports]

    return kvpress.DecodingPress(base_press=getattr(kvpress, method)(), target_size=keys)


def read_in_pieces(model: Any, press: Any, context: list[int], piece: int) -> Any:
    """A cache of the context, read in pieces; after each, the press compresses what every layer keeps.

    press    has target_size, and compress(module, hidden_states, keys, values, attentions, kwargs)
    """
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache()

    def compress(module: Any, _: Any, named: dict[str, Any], output: Any) -> None:
        layer = cache.layers[module.layer_idx]
        if layer.keys.shape[2] > press.target_size:
            layer.keys, layer.values = press.compress(
                module, named["hidden_states"], layer.keys, layer.values, None, named
            )

    hooks = [
        layer.self_attn.register_forward_hook(compress, with_kwargs=True) for layer in model.model.layers
    ]
    try:
        for start in range(0, len(context), piece):
            ids = torch.tensor([context[start : start + piece]], device=model.device)
            positions = torch.arange(start, start + ids.shape[1], device=model.device)[None]
            model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return cache


# --------------------------------------------------------------------------------------- both of them


def put_together(options: argparse.Namespace) -> None:
    """One file with the results of both parts, and the share of the bytes that each method keeps."""
    given = json.loads(options.questions.read_text())
    methods: dict[str, Any] = {}
    for file in options.results:
        for name, row in json.loads(file.read_text()).items():
            methods[name] = {**row, "share": _share(name), "kind": row.get("kind", "kvpress")}
    written = {
        "model": "SmolLM2-135M-Instruct, Q4_1 weights in fp32",
        "machine": "; ".join(sorted({row.get("machine", "a CPU") for row in methods.values()})),
        "distance": given["distance"],
        "questions": len(given["questions"]),
        "texts": len(given["texts"]),
        "tokens": CONTEXT,
        "bytes": 90 * CONTEXT * 2 * 64 * 2,  # 30 layers of 3 key-value heads of size 64, in bf16
        "methods": methods,
    }
    options.out.write_text(json.dumps(written, indent=1) + "\n")


def _name_of(chosen: dict[str, Any]) -> str:
    """Maclaurin 25%: 15 heads exp/sum, others …"""
    budget = chosen["budget"]
    return f"Maclaurin {100 * budget['bytes'] / budget['original']:.3g}%: {chosen['plan']['name']}"


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """Questions and texts, or the first `limit` questions and all texts."""
    given = json.loads(options.questions.read_text())
    return {**given, "questions": given["questions"][: options.limit]}


def _machine(device: str) -> str:
    import torch

    place = torch.cuda.get_device_name() if device.startswith("cuda") else "a CPU"
    return f"torch {torch.__version__} on {place}"


def _share(name: str) -> float:
    """KnormPress 0.25 → 0.25; Maclaurin 25%: … → 0.25; the original keeps everything."""
    if name == "original":
        return 1.0
    if name.startswith("Maclaurin"):
        return float(name.partition("%")[0].rpartition(" ")[2]) / 100
    return float(name.rpartition(" ")[2])


def _kept_of(row: dict[str, Any], logits: Any) -> list[float]:
    """Of logits [n, vocabulary]: those of a question's choices at the end, or −ln p of a text's tokens."""
    if "choices" in row:
        return logits[-1, row["choices"]].double().tolist()
    predicted = logits[:-1].double().log_softmax(-1)
    return [-float(predicted[n, token]) for n, token in enumerate(row["continuation"][1:])]


def _summary(
    rows: list[dict[str, Any]], answers: list[list[float]], losses: list[list[float]]
) -> dict[str, Any]:
    """Accuracy with Wilson's 95 % interval, mean log-odds of the right answer, perplexity of what follows."""
    odds = []
    for row, found in zip(rows, answers, strict=True):
        others = [x for n, x in enumerate(found) if n != row["right"]]
        top = max(others)
        total = top + math.log(sum(math.exp(x - top) for x in others))
        odds.append((found[row["right"]] > top, found[row["right"]] - total))
    number, z = len(rows), 1.96
    share = sum(right for right, _ in odds) / number
    centre = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    spread = z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    every = [loss for text in losses for loss in text]
    return {
        "accuracy": share,
        "low": centre - spread,
        "high": centre + spread,
        "log_odds": sum(x for _, x in odds) / number,
        "questions": number,
        "perplexity": math.exp(sum(every) / len(every)) if every else None,
        "log_odds_of_each": [round(x, 4) for _, x in odds],
    }


def _write(out: Path, found: dict[str, Any]) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")
    for name, row in found.items():
        ppl = "" if row["perplexity"] is None else f"  {row['perplexity']:.2f}"
        print(
            f"{name:40} {row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]  "
            f"{row['log_odds']:+.2f}{ppl}",
            flush=True,
        )


if __name__ == "__main__":
    main()
