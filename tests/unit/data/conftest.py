"""A small corpus on disk, and sources over it with a cache of their own."""

import json
import random

import pytest

from maclaurin.data import DataConfig, open_source

WORDS = ["attention", "is", "a", "recurrent", "network", "with", "an", "infinite", "state", "cut", "off"]


def make_texts(count, seed=0):
    rng = random.Random(seed)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))) for i in range(count)]


@pytest.fixture
def texts():
    return make_texts(80)


@pytest.fixture
def jsonl(tmp_path, texts):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def open_data(jsonl, cache):
    """open_source with the small corpus, bytes and a private cache unless told otherwise."""

    def open_(**changes):
        usual = {
            "data": str(jsonl),
            "tokenizer": "bytes",
            "length": 32,
            "validation_fraction": 0.2,
            "test_fraction": 0.2,
            "cache": str(cache),
        }
        return open_source(DataConfig(**{**usual, **changes}), progress=False)

    return open_
