"""Settings that several studies share, so that they share runs too."""

from maclaurin.study import Tune

#: first learning rates of a search; the two best are trained with a second seed
RATES = Tune(rates=(1e-3, 2e-3, 4e-3, 8e-3, 16e-3), confirm=(1001,))
#: a search from two rates: in the end each cell has tried a rate on either side of its best
SHORT_SEARCH = Tune(rates=(4e-3, 8e-3), confirm=(1001,))
#: the same, and then the factor of the rate for the output projections of attention, which decides how norms
#: and softmax compare (study scale); some twelve runs per cell
SEARCH_OF_BOTH = Tune(rates=(4e-3, 8e-3), factors=(0.25, 0.5, 1.0), confirm=(1001,))

#: text at pico size: 300 steps of 16 × 128 tokens, about half a minute on one core; final losses are over
#: 1,024 rows (131,000 tokens) of some 50 files, always the same rows
PICO_TEXT = {
    "size": "pico",
    "data": "stdlib",
    "tokenizer": "bpe:512",
    "steps": 300,
    "batch_size": 16,
    "eval_every": 100,
    "eval_rows": 128,
    "final_rows": 1024,
    "checkpoint_every": 0,
}
PICO_TEXT_TITLE = "Next token of Python's standard library, 0.6M tokens of training"

#: prose and documentation on one H200: 300 steps of 64 × 512 tokens
H200_PROSE = {
    "data": "prose.jsonl.xz",
    "tokenizer": "bpe:8192",
    "length": 512,
    "batch_size": 64,
    "steps": 300,
    "warmup": 30,
    "schedule": "linear",
    "final_lr": 0.0,
    "precision": "bf16",
    "equal_start": True,
    "eval_every": 75,
    "eval_rows": 128,
    "final_rows": 0,
    "checkpoint_every": 0,
}

#: recall at pico size; with torch's initialisation it is learned in far fewer steps (docs/LOG.md)
PICO_RECALL = {
    "size": "pico",
    "initialization": "torch",
    "batch_size": 64,
    "eval_rows": 128,
    "final_rows": 0,
    "checkpoint_every": 0,
}
