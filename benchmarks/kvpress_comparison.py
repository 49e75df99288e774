"""Recall at equal bytes, beside the methods of kvpress: the same questions, the same model.

    # in our environment: an ordinary Llama folder, questions as tokens, and what we reach on them
    python benchmarks/kvpress_comparison.py folder MODEL HF_FOLDER
    python benchmarks/kvpress_comparison.py questions MODEL questions.json --distance 1024 --number 200
    python benchmarks/kvpress_comparison.py ours MODEL questions.json ours.json --attention plan.json
    # in an environment of its own with kvpress and transformers: what its methods reach
    python benchmarks/kvpress_comparison.py kvpress HF_FOLDER questions.json kvpress.json --share 0.25

kvpress compresses after the whole prompt was read with full attention. `ours` is asked both ways: pressed
like that, and with the memory limited while reading, which is the harder task. plan.json is the
conversion.json of `maclaurin convert --memory`, whose attention is used.

The half for kvpress imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any, cast

#: methods by their class in kvpress
METHODS = (
    "StreamingLLMPress", "KnormPress", "SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "KeyDiffPress",
)  # fmt: skip


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
    for name in ("ours", "kvpress"):
        step = steps.add_parser(name)
        step.add_argument("model")
        step.add_argument("questions", type=Path)
        step.add_argument("out", type=Path)
        step.add_argument("--device", default="cpu")
        if name == "ours":
            step.add_argument("--attention", type=Path, required=True)
        else:
            step.add_argument("--share", type=float, default=0.25, help="of the keys of the whole prompt")
    options = parser.parse_args()
    run = {"folder": write_folder, "questions": write_questions, "ours": ask_ours, "kvpress": ask_kvpress}
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
    """Contexts, prompts and the first token that tells the choices apart, as token numbers."""
    from maclaurin.conversion.fact_questions import fact_questions
    from maclaurin.conversion.run import loaded

    _, tokenizer = loaded(options.model, "cpu")
    questions = fact_questions(tokenizer, [options.distance], options.number)
    rows = [
        {
            "context": q.context[0].tolist(),
            "prompt": q.prompt[0].tolist(),
            "choices": list(q.choices),
            "right": q.right,
        }
        for q in questions
    ]
    options.out.write_text(json.dumps({"distance": options.distance, "questions": rows}) + "\n")


def ask_ours(options: argparse.Namespace) -> None:
    """The original, the plan while reading, and the plan after the prompt was read in full."""
    import torch

    import maclaurin
    from maclaurin.conversion.measure import having
    from maclaurin.conversion.run import loaded
    from maclaurin.models import MaclaurinCache, MaclaurinConfig

    model, _ = loaded(options.model, options.device)
    attention = json.loads(options.attention.read_text())["attention"]
    rows = json.loads(options.questions.read_text())["questions"]

    @torch.no_grad()
    def logits(row: dict[str, Any]) -> list[float]:
        cache = MaclaurinCache(cast("MaclaurinConfig", model.config))
        device = model.device
        model(
            input_ids=torch.tensor([row["context"]], device=device), past_key_values=cache, logits_to_keep=1
        )
        out = model(input_ids=torch.tensor([row["prompt"]], device=device), past_key_values=cache)
        return out.logits[0, -1, row["choices"]].double().tolist()

    found = {"original": _summary(rows, [logits(row) for row in rows])}
    with having(model, attention):
        found["limited while reading"] = _summary(rows, [logits(row) for row in rows])
    with maclaurin.press(model, attention):
        found["pressed after reading"] = _summary(rows, [logits(row) for row in rows])
    _write(options.out, found)


def ask_kvpress(options: argparse.Namespace) -> None:
    """Each method at the compression that leaves so large a share of the keys."""
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(options.model).to(options.device).eval()
    rows = json.loads(options.questions.read_text())["questions"]
    found = {}
    for method in METHODS:
        press = getattr(kvpress, method)(compression_ratio=1 - options.share)
        answers = []
        for row in rows:
            cache = DynamicCache()
            with torch.no_grad():
                with press(model):
                    model(torch.tensor([row["context"]], device=model.device), past_key_values=cache)
                # positions go on where the whole context ended, however many keys are left
                first = len(row["context"])
                positions = torch.arange(first, first + len(row["prompt"]), device=model.device)[None]
                out = model(
                    torch.tensor([row["prompt"]], device=model.device),
                    past_key_values=cache,
                    position_ids=positions,
                )
            answers.append(out.logits[0, -1, row["choices"]].double().tolist())
        found[method] = _summary(rows, answers)
    _write(options.out, found)


def _summary(rows: list[dict[str, Any]], answers: list[list[float]]) -> dict[str, float]:
    """Accuracy with Wilson's 95 % interval, and mean log-odds of the right answer against the others."""
    right = sum(
        max(range(len(a)), key=a.__getitem__) == row["right"] for row, a in zip(rows, answers, strict=True)
    )
    odds = []
    for row, a in zip(rows, answers, strict=True):
        others = [x for n, x in enumerate(a) if n != row["right"]]
        top = max(others)
        odds.append(a[row["right"]] - top - math.log(sum(math.exp(x - top) for x in others)))
    number, z = len(rows), 1.96
    share = right / number
    centre = (share + z**2 / (2 * number)) / (1 + z**2 / number)
    spread = z / (1 + z**2 / number) * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    return {
        "accuracy": share,
        "low": centre - spread,
        "high": centre + spread,
        "log_odds": sum(odds) / number,
        "questions": number,
    }


def _write(out: Path, found: dict[str, dict[str, float]]) -> None:
    out.write_text(json.dumps(found, indent=1) + "\n")
    for name, row in found.items():
        print(
            f"{name:26} {row['accuracy']:.3f} [{row['low']:.3f}, {row['high']:.3f}]  {row['log_odds']:+.2f}"
        )


if __name__ == "__main__":
    main()
