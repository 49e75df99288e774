"""The tokenizer of a model: the one given, the model's own, or the one its run was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from maclaurin.data.cache_folder import Cache
from maclaurin.data.data_config import is_task, open_corpus
from maclaurin.data.splits import USUAL_FRACTION, CorpusSplitter, Fractions
from maclaurin.data.text_tokenizers import SEPARATOR, open_byte_pairs
from maclaurin.errors import DataError, InputError
from maclaurin.models.model_folder import as_fast_tokenizer, named_tokenizer
from maclaurin.plain_data import read_json


def tokenizer_for(
    model: str, vocabulary: int, own: Any | None, asked: str | None
) -> tuple[PreTrainedTokenizerBase, str]:
    """A tokenizer of transformers, and its name for results."""
    if asked is not None:
        found, name = named_tokenizer(asked), asked
    elif own is not None:
        found, name = own, "the model's own"
    else:
        found, name = _of_run(Path(model))
    return _checked(found, name, vocabulary), name


def _of_run(folder: Path) -> tuple[PreTrainedTokenizerBase, str]:
    """The tokenizer named in the config.json of a run, if none is saved with the weights."""
    config = _config(folder)
    written, data = config.get("tokenizer"), config.get("data")
    if not isinstance(written, str) or not isinstance(data, str):
        raise InputError(
            f"{folder} has no tokenizer, so it cannot read text. Give one with `tokenizer`: a folder, a "
            "tokenizer.json, a name on the hub, or bytes for a model of bytes."
        )
    if is_task(data):
        raise InputError(
            f"{folder} was trained on the task {data}, whose tokens stand for no text, so it can neither "
            "read a text nor answer questions. Use a model that was trained on text."
        )
    kind, _, rest = written.partition(":")
    if kind == "bpe":
        fractions = Fractions(
            config.get("validation_fraction", USUAL_FRACTION), config.get("test_fraction", USUAL_FRACTION)
        )
        return _learned(int(rest), data, config.get("limit_documents"), fractions), written
    return named_tokenizer(rest if kind == "hf" else written), written


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    return config if isinstance(config, dict) else {}


def _learned(size: int, data: str, limit: int | None, fractions: Fractions) -> PreTrainedTokenizerFast:
    """From the cache, or learned again from the same text, which gives the same one."""
    from tokenizers import Tokenizer

    cache = Cache.at(None)
    try:
        corpus = open_corpus(data, limit=limit, notes=cache.notes, other_names=(), progress=True)
        pairs = open_byte_pairs(size, corpus, CorpusSplitter(corpus, fractions), cache.tokenizers)
    except DataError as problem:
        raise InputError(
            f"the run's tokenizer bpe:{size} was learned from {data}, which cannot be read now: {problem}"
        ) from None
    return as_fast_tokenizer(Tokenizer.from_str(pairs.serialized))


def _checked(tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int) -> PreTrainedTokenizerBase:
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary:
        raise InputError(
            f"the tokenizer {name} has tokens up to {largest}, but the model has {vocabulary} tokens: they "
            "do not belong together. Give the model's own with `tokenizer`."
        )
    if tokenizer.eos_token_id is None and SEPARATOR in tokenizer.get_vocab():
        tokenizer.eos_token = SEPARATOR
    return tokenizer


def require_end_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Raise unless there is a token for the end of a text: evaluations put it before every text."""
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"the tokenizer {name} has no token for the end of a text (eos_token), which is put before every "
            "text: give a folder whose tokenizer_config.json names one."
        )
