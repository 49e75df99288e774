"""`--smoke`: a run for a few steps at tiny width, with a small local file in place of a hub data set."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from maclaurin.data.data_config import PRESETS, is_task
from maclaurin.errors import load_extra
from maclaurin.files import new_file
from maclaurin.models.configuration import size_named
from maclaurin.training.config import TrainConfig

STEPS, SIZE, LENGTH, BATCH, DOCUMENTS = 5, "nano", 64, 4, 300


def smoke_config(config: TrainConfig, folder: Path, world: int) -> TrainConfig:
    """The same run, but short; `folder` holds stand-ins for data, `world` is the number of processes."""
    own = size_named(SIZE)
    heads = config.kv_heads if config.kv_heads and own.heads % config.kv_heads == 0 else None
    many = len(config.attention) > 1
    return config.replace(
        attention=(config.attention * own.layers)[: own.layers] if many else config.attention,
        size=SIZE,
        kv_heads=heads,
        batch_size=-(-BATCH // world) * world,
        accumulate=1,
        steps=STEPS,
        warmup=1,
        decay_steps=STEPS,
        precision="fp32",
        compile=False,
        eval_every=0,
        eval_rows=BATCH * world,
        checkpoint_every=0,
        log_every=1,
        trackers=(),
        **_small_data(config, folder),
    )


def _small_data(config: TrainConfig, folder: Path) -> dict[str, Any]:
    if is_task(config.data):
        return {}
    return {
        "data": _stand_in(PRESETS.get(config.data, config.data), folder),
        "tokenizer": "bytes" if config.tokenizer == "bytes" else "bpe:512",
        "length": LENGTH,
        "limit_documents": DOCUMENTS,
    }


def _stand_in(data: str, folder: Path) -> str:
    """A folder with one small file, read in the same way as the data set."""
    if not data.startswith("hf:"):
        return data
    name = data.removeprefix("hf:").partition("@")[0].partition(":")[0]
    place = folder.absolute() / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    file = place / "train.parquet"
    if not file.exists():
        _write_parquet(file)
    return f"hf:{place}"


def _write_parquet(file: Path) -> None:
    """Documents of random words in a column `text`, beside a column that is to be ignored."""
    arrow = load_extra("pyarrow", "data", "a stand-in for a data set of the hub", "use data=stdlib")
    parquet = load_extra("pyarrow.parquet", "data", "a stand-in for a data set of the hub", "use data=stdlib")
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randint(2, 8))) for _ in range(500)]
    rows = [
        {"text": " ".join(dice.choices(words, k=dice.randint(20, 120))) + ".", "id": str(n)}
        for n in range(DOCUMENTS)
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    with new_file(file) as temporary:
        parquet.write_table(arrow.Table.from_pylist(rows), temporary)
