"""Our tasks asked without a harness: likelihoods, written answers, and what is counted."""

import math

import pytest
import torch

from maclaurin.evaluation.eval_task import Item, Query
from maclaurin.evaluation.likelihood import (
    TextReader,
    ending_log_likelihoods,
    perplexity,
    summed_loss,
    windowed_loss,
)
from maclaurin.evaluation.scoring import Answer, Scorer, answer_metrics, ask, written_score
from maclaurin.models import MaclaurinConfig, MaclaurinForCausalLM
from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer

TAIL = "taylor(2,about=mean)+window(4,sinks=1)/sum"


def make(attention="exp/sum"):
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention=attention,
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return MaclaurinForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def tokenizer():
    return as_fast_tokenizer(byte_tokenizer())


def by_hand(model, text, end):
    """ln p of `end` after `text` from one pass over both."""
    tokens = torch.tensor([[256, *text.encode(), *end.encode()]])
    with torch.no_grad():
        found = model(tokens).logits[0, :-1].double().log_softmax(-1)
    each = found.gather(1, tokens[0, 1:, None])[:, 0]
    return float(each[-len(end.encode()) :].sum())


ITEM = Item(
    "some text before the question\n",
    (
        Query("the answer is", ("red", "blue", "bluer", "green"), (1,), known_until=4),
        Query("it was", ("one", "two"), (0,), known_until=9),
    ),
    without="other text\n",
)


@pytest.mark.parametrize("attention", ["exp/sum", TAIL])
def test_likelihoods_are_those_of_whole_rows(attention, tokenizer):
    """Also where choices begin alike and one is the beginning of another, and with a constant-size state."""
    model = make(attention)
    scorer = Scorer(model, tokenizer, 1000)
    for context in (ITEM.context, ITEM.without):
        for query, found in zip(ITEM.queries, scorer._likelihoods(context, ITEM.queries), strict=True):
            expected = [by_hand(model, context + query.prompt, f" {choice}") for choice in query.choices]
            shifted = [a - b for a, b in zip(found, expected, strict=True)]
            assert shifted == pytest.approx([shifted[0]] * len(shifted), abs=1e-4)


BEGINNINGS = ("the first beginning", "a second one", "some third text")
ENDS = Item(
    "before\n", (Query("and its end", BEGINNINGS, (1,)), Query("more", BEGINNINGS, (0,))), without=None
)


def test_an_ending_is_scored_after_each_beginning(model, tokenizer):
    scorer = Scorer(model, tokenizer, 1000)
    expected = [
        [by_hand(model, f"before\n{choice}", f" {query.prompt}") for choice in BEGINNINGS]
        for query in ENDS.queries
    ]
    for found, each in zip(scorer._ending_likelihoods(ENDS), expected, strict=True):
        assert found == pytest.approx(each, abs=1e-4)
    for answer, query, each in zip(scorer.answers(ENDS, "endings"), ENDS.queries, expected, strict=True):
        assert answer.score == float(each.index(max(each)) == query.right[0])
        assert answer.prior is None
    found = ask(scorer, [ENDS], "endings")
    assert (found.questions, found.truncated, set(found.metrics)) == (2, 0, {"acc", "log_odds"})


@pytest.mark.parametrize("attention", ["taylor(2,about=mean)/sum", TAIL])
def test_texts_of_different_lengths_are_read_together(attention, tokenizer):
    """Padding on the right changes nothing before it."""
    model = make(attention)
    texts = [(list(b"abc"), list(b" de")), (list(b"a longer one"), list(b" f")), (list(b"x"), list(b" yz"))]
    alone = [ending_log_likelihoods(model, [text])[0] for text in texts]
    assert ending_log_likelihoods(model, texts) == pytest.approx(alone, abs=1e-4)


def test_beginnings_that_are_too_long_lose_their_start_and_are_counted(model, tokenizer):
    assert ask(Scorer(model, tokenizer, 24), [ENDS, ENDS], "endings").truncated == 2
    short, whole = (Scorer(model, tokenizer, most)._ending_likelihoods(ENDS) for most in (24, 1000))
    assert short != whole
    unstable = make()
    unstable.lm_head.weight.data[5, 0] = torch.nan
    assert ask(Scorer(unstable, tokenizer, 1000), [ENDS], "endings").non_finite == 2


def test_the_context_is_read_once(model, tokenizer, monkeypatch):
    read = []
    forward = type(model).forward

    def counted(self, *arguments, input_ids, **options):
        read.append(input_ids.shape[1])
        return forward(self, *arguments, input_ids=input_ids, **options)

    monkeypatch.setattr(type(model), "forward", counted)
    scorer = Scorer(model, tokenizer, 1000)
    scorer._likelihoods(ITEM.context, ITEM.queries)
    assert sum(size >= len(ITEM.context) for size in read) == 1


def test_answers_are_scored_by_rank_and_by_odds(model, tokenizer):
    scorer = Scorer(model, tokenizer, 1000)
    answers = scorer.answers(ITEM, "choices")
    for query, answer, given, prior in zip(
        ITEM.queries,
        answers,
        scorer._likelihoods(ITEM.context, ITEM.queries),
        scorer._likelihoods(ITEM.without, ITEM.queries),
        strict=True,
    ):
        assert answer.score == float(given.index(max(given)) == query.right[0])

        def odds(found, right=query.right[0]):
            p = [math.exp(x - max(found)) for x in found]
            return math.log(p[right] / (sum(p) - p[right]))

        assert answer.log_odds == pytest.approx(odds(given))
        assert answer.prior == pytest.approx(odds(prior))
    several = Item("text ", (Query("and", ("a", "b", "c", "d"), (0, 2)),), without=None)
    (answer,) = scorer.answers(several, "choices")
    assert answer.score in (0, 0.5, 1)
    assert answer.prior is None


def test_long_texts_lose_their_beginning_and_are_counted(model, tokenizer):
    scorer = Scorer(model, tokenizer, 40)
    long = Item("x" * 60 + "\n", ITEM.queries[:1], without=None)
    found = ask(scorer, [long, Item("x\n", ITEM.queries[:1], without=None)], "choices")
    assert (found.truncated, found.questions) == (1, 2)
    (short,) = scorer._likelihoods("x" * 10 + "\n", ITEM.queries[:1])
    uncut = Scorer(model, tokenizer, 1000)
    assert short == pytest.approx(uncut._likelihoods("x" * 10 + "\n", ITEM.queries[:1])[0])
    assert ask(scorer, [long], "written").truncated == 1


def test_output_that_is_not_a_number_counts_as_wrong(tokenizer):
    model = make()
    model.lm_head.weight.data[5, 0] = torch.nan
    scorer = Scorer(model, tokenizer, 1000)
    for mode, metric in (("choices", "acc"), ("written", "exact_match")):
        found = ask(scorer, [ITEM], mode)
        assert found.non_finite == 2
        assert found.metrics[metric].value == 0
        assert set(found.metrics) == {metric}


def test_the_distance_is_that_of_this_tokenizer(model, tokenizer):
    found = ask(Scorer(model, tokenizer, 1000), [ITEM], "choices")
    lengths = [1 + len(ITEM.context[q.known_until :] + q.prompt) for q in ITEM.queries]
    assert (found.distance[0], found.distance[2]) == (min(lengths), max(lengths))
    assert ask(Scorer(model, tokenizer, 1000), [Item("some text")], "text").distance is None


def test_written_answers_come_from_greedy_decoding(model, tokenizer):
    """What generate() writes, up to the end of a line."""
    scorer = Scorer(model, tokenizer, 1000)
    prompt = ITEM.context + ITEM.queries[0].prompt
    reader = scorer._read([scorer.tokens(prompt)], 0)[0]
    found = scorer._continuation(reader, 6)
    tokens = torch.tensor([scorer.tokens(prompt)])
    expected = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
    )
    text = tokenizer.decode(expected[0, tokens.shape[1] :], skip_special_tokens=True)
    assert text.startswith(found)
    assert found == text or "\n" in found.lstrip()


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        (" river.", ("river",), 1),
        (" the river", ("river",), 0),
        (" River, and so on", ("river",), 1),
        (" lamp, river and stone", ("river", "lamp", "stone"), 1),
        (" lamp, wolf, river, stone", ("river", "lamp", "stone"), 2 / 3),
        (" 48213", ("48213",), 1),
        ("", ("river",), 0),
    ],
)
def test_the_first_words_written_count(text, answers, score):
    assert written_score(text, answers) == pytest.approx(score)


def test_questions_about_one_text_are_averaged_first():
    answers = [
        [Answer(1.0, 2.0, 1.0), Answer(0.0, 4.0, 1.0)],
        [Answer(1.0, 1.0, None), Answer(1.0, 3.0, None)],
    ]
    found = answer_metrics(answers, "choices")
    assert found["acc"].value == 0.75
    assert found["log_odds"].value == pytest.approx(2.5)
    assert found["log_odds_gain"].value == pytest.approx(2.0)
    assert found["log_odds_gain"].stderr is None
    assert "log_odds" not in answer_metrics([[Answer(1.0)]], "written")


def test_the_loss_of_a_text_is_the_sum_over_its_tokens(model, tokenizer):
    text = "a text that is longer than one window of the model"
    scorer = Scorer(model, tokenizer, 1000)
    assert scorer.text_loss(text) == pytest.approx(-by_hand(model, "", text), rel=1e-5)
    found = ask(scorer, [Item(text), Item(text)], "text").metrics
    loss = scorer.text_loss(text) / len(text)
    assert found["byte_perplexity"].value == pytest.approx(math.exp(loss))
    assert found["bits_per_byte"].value == pytest.approx(loss / math.log(2))
    assert found["word_perplexity"].value == pytest.approx(math.exp(loss * len(text) / len(text.split())))


def test_windows_of_a_long_text_cover_every_token_once(model):
    tokens = list(b"some more text than fits into a window")
    pieces = [torch.tensor([256, *tokens][start : start + 9]) for start in range(0, len(tokens), 8)]
    expected = sum(summed_loss(model, piece) for piece in pieces)
    assert windowed_loss(model, tokens, 256, 9) == pytest.approx(expected)
    assert sum(len(piece) - 1 for piece in pieces) == len(tokens)
    assert windowed_loss(model, tokens, 256, 99) == pytest.approx(
        summed_loss(model, torch.tensor([256, *tokens]))
    )
    assert perplexity(1000) == math.inf


def test_a_reader_can_be_continued_in_several_ways(model):
    reader = TextReader.of(model, list(b"start"))
    longer = reader.after(list(b" here"))
    assert reader.after([]) is reader
    once = by_hand_tokens(model, b"start", b" here!")
    assert reader.log_likelihood(list(b" here!")) == pytest.approx(once, abs=1e-4)
    assert longer.log_likelihood(list(b"!")) == pytest.approx(
        once - by_hand_tokens(model, b"start", b" here"), abs=1e-4
    )
    first = reader.greedy(5, lambda found: len(found) == 3)
    assert len(first) == 3
    assert first[0] == int(reader.next_token.argmax())
    assert len(reader.greedy(2, lambda found: False)) == 2


def by_hand_tokens(model, text, end):
    tokens = torch.tensor([[*text, *end]])
    with torch.no_grad():
        found = model(tokens).logits[0, :-1].double().log_softmax(-1)
    return float(found.gather(1, tokens[0, 1:, None])[-len(end) :].sum())
