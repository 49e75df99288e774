"""Our model answers the harness as the harness's own class would."""

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from maclaurin.evaluation.answering import AnsweringModel
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.tokenizer_folder import as_fast_tokenizer, byte_tokenizer

CONTEXTS = ["one", "a somewhat longer text", "a\x00", "the third text of them all \x00\x00"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention="exp/sum",
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=48,
    )
    return MaclaurinForCausalLM(config).eval()


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=n) for n, a in enumerate(arguments)]


def ours(model, batch_size):
    return AnsweringModel(model, as_fast_tokenizer(byte_tokenizer()), batch_size, None, bars=False)


def theirs(model, batch_size):
    return HFLM(pretrained=model, tokenizer=as_fast_tokenizer(byte_tokenizer()), batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_likelihoods_are_the_same_from_fewer_logits(model, batch_size):
    pairs = [(text, end) for text in CONTEXTS for end in (" x", " yes", "\x00", " a long end")]
    requests = instances("loglikelihood", pairs)
    found = ours(model, batch_size).loglikelihood(requests)
    expected = theirs(model, batch_size).loglikelihood(requests, disable_tqdm=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-4)


def test_rolling_likelihood_is_the_sum_over_every_token_after_one_separator(model):
    texts = [text * 2 for text in CONTEXTS]
    found = ours(model, 2).loglikelihood_rolling(instances("loglikelihood_rolling", [(t,) for t in texts]))
    for text, likelihood in zip(texts, found, strict=True):
        tokens = torch.tensor([[256, *text.encode()]])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1].log_softmax(-1)
        assert likelihood == pytest.approx(float(logits.gather(1, tokens[0, 1:, None]).sum()), abs=2e-2)


def test_texts_that_do_not_fit_are_counted(model):
    asked = ours(model, 2)
    asked.loglikelihood(instances("loglikelihood", [("x" * 46, " y"), ("x" * 47, " y")]))
    assert asked.cut == 1
    asked.begin("next")
    settings = {"until": ["."], "max_gen_toks": 8, "do_sample": False}
    asked.generate_until(instances("generate_until", [("x" * 39, settings), ("x" * 40, settings)]))
    assert asked.cut == 1


def test_output_that_is_no_number_is_counted(model):
    asked = ours(model, 2)
    with torch.no_grad():
        kept = model.lm_head.weight[5, 0].clone()
        model.lm_head.weight[5, 0] = torch.nan
    asked.loglikelihood(instances("loglikelihood", [("abc", " y")]))
    model.lm_head.weight.data[5, 0] = kept
    assert asked.broken == 1
