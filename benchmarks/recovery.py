"""How much a converted model recovers by training, and whether its tail is the reason.

    python benchmarks/recovery.py MODEL --name NAME --data corpus.jsonl --text novel.txt

Four models are trained in the same way with `maclaurin convert`, in parallel: with a window and a polynomial
tail, with a window and kept keys, with the window alone, and with the original's attention. The window alone
shows the effect of training without tail and kept keys, the original that of the training text. With --mix,
the text contains recall and copying. All are measured on a text that none is trained on; results go to
benchmarks/results/recovery.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import stamp

from maclaurin.conversion.conversion_record import Gap
from maclaurin.conversion.fact_questions import RecallOverDistance
from maclaurin.conversion.measure import Measure, Perplexity

KINDS: dict[str, type[Measure]] = {kind.kind: kind for kind in (Perplexity, RecallOverDistance)}
RESULTS = Path(__file__).parent / "results" / "recovery.json"
WINDOW = "window(64,sinks=1)/sum"
KEPT = "poly(0)+window(64,sinks=1,kept=256)/sum"
ARMS = {
    "tail": f"taylor(2,about=mean)+{WINDOW}",
    "kept": KEPT,
    "window": f"poly(0)+{WINDOW}",
    "softmax": "exp/sum",
}


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    running = {arm: _start(arm, options) for arm in ARMS}
    try:
        codes = {arm: process.wait() for arm, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    seconds = time.time() - begin
    failed = [arm for arm, code in codes.items() if code]
    if failed:
        sys.exit(f"{', '.join(failed)} failed: see the .log files in {options.out}")
    found = {arm: _found(options.out / arm) for arm in ARMS}
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "name")}
    settings |= {name: Path(settings[name]).name for name in ("model", "data", "text")}
    known[options.name] = {
        "machine": stamp(),
        "settings": settings,
        "seconds_all_arms_side_by_side": round(seconds, 1),
        "arms": found,
        "gap_closed": _gap_closed(found, "tail"),
        "gap_closed_by_kept": _gap_closed(found, "kept"),
    }
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    closed = {name: known[options.name][name] for name in ("gap_closed", "gap_closed_by_kept")}
    print(json.dumps(closed, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Recovery of a converted model, with controls.")
    parser.add_argument("model", help="as maclaurin convert takes it")
    parser.add_argument("--data", required=True, help="text to train on")
    parser.add_argument("--text", required=True, type=Path, help="text to measure on")
    parser.add_argument("--name", required=True, help="name of the result")
    parser.add_argument("--about", default="", help="what these texts are, in words, kept with the result")
    parser.add_argument("--match-steps", type=int, default=200)
    parser.add_argument("--kl-steps", type=int, default=0)
    parser.add_argument("--text-steps", type=int, default=600)
    parser.add_argument("--mix", type=float, default=0.0, help="share of recall and copying in the text")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--sample-tokens", type=int, default=32768)
    parser.add_argument("--recall", default="256,1024")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("recovery"))
    options = parser.parse_args()
    if options.text_steps < 1:
        parser.error("--text-steps must be 1 or more: the original has nothing else to be trained on")
    return options


def _start(arm: str, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    # the original has nothing to match
    matched, distilled = (0, 0) if arm == "softmax" else (options.match_steps, options.kl_steps)
    arguments = {
        "attention": ARMS[arm], "out": options.out / arm, "text": options.text, "data": options.data,
        "lengths": options.lengths, "sample-tokens": options.sample_tokens, "recall": options.recall,
        "questions": options.questions, "match-steps": matched, "kl-steps": distilled, "mix": options.mix,
        "text-steps": options.text_steps,
        "length": options.length, "batch-size": options.batch_size, "precision": options.precision,
        "device": options.device,
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in arguments.items()]
    log = (options.out / f"{arm}.log").open("wb")
    threads = max(1, (os.cpu_count() or 1) // len(ARMS))
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, "-m", "maclaurin", "convert", options.model, *given],
        stdout=log, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip


def _found(folder: Path) -> dict[str, Any]:
    """The measurements of the command, and the records of the training."""
    written = json.loads((folder / "conversion.json").read_text())
    kept = {name: written.get(name) for name in ("attention", "memory", "perplexity", "recall")}
    kept["attention"] = sorted(set(written["attention"]))
    kept["seconds_of_training"] = written["recovery"]["seconds"]
    return {**kept, "training": {run.name: _training(run) for run in sorted((folder / "recovery").iterdir())}}


def _training(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return {
        "steps": steps[-1]["step"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
    }


def _gap_closed(arms: dict[str, Any], arm: str) -> dict[str, Any]:
    """Share of the gap from window to softmax that is closed: untrained, trained, among trained models."""
    return {kind: {at: _shares(arms, arm, kind, at) for at in arms[arm][kind]} for kind in KINDS}


def _shares(arms: dict[str, Any], arm: str, kind: str, at: str) -> dict[str, float | None]:
    own, alone, softmax = (arms[name][kind][at] for name in (arm, "window", "softmax"))
    higher = KINDS[kind].higher_is_better
    return {
        "untrained": own["gap_closed"],
        "trained": Gap(own["original"], own["window_only"], own["recovered"], higher).closed,
        "among_trained": Gap(softmax["recovered"], alone["recovered"], own["recovered"], higher).closed,
    }


if __name__ == "__main__":
    main()
