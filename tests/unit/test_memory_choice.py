"""A memory chosen for a budget: bytes, heads, plans, and a conversion that goes on where it stopped."""

import json
from itertools import pairwise

import pytest
import torch

import maclaurin
from maclaurin import InputError, MaclaurinError
from maclaurin.conversion import choose_memory, convert_model, head_measures
from maclaurin.conversion.allocate import (
    MemoryPlan,
    attention_of,
    bytes_of,
    decide,
    keys_of_heads,
    memories_to_try,
    plans_for,
    reference_plans,
)
from maclaurin.conversion.choose_memory import MemoryRequest, distances_for
from maclaurin.conversion.conversion_record import Recovery, read_conversion
from maclaurin.conversion.fact_questions import answers_together, fact_questions, reaches_of
from maclaurin.conversion.head_measures import Asked, HeadMeasures, TextDamage, measure_damage, measure_heads
from maclaurin.conversion.measure import MeasureFile
from maclaurin.conversion.memory_budget import read_budget
from maclaurin.conversion.memory_page import METHODS
from maclaurin.layers.watch_attention import attention_layers
from maclaurin.models import MaclaurinCache, MaclaurinConfig, MaclaurinForCausalLM, save_quietly
from maclaurin.models.model_folder import as_fast_tokenizer, byte_tokenizer
from maclaurin.models.modeling import with_attention
from maclaurin.plain_data import to_plain
from maclaurin.spec import parse
from maclaurin.spec.head_groups import LayerAttention

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 90


@pytest.fixture(scope="module")
def tokenizer():
    return as_fast_tokenizer(byte_tokenizer())


def model_of(attention="exp/sum", tokenizer_size=300):
    torch.manual_seed(0)
    config = MaclaurinConfig(
        attention=attention, vocab_size=tokenizer_size, hidden_size=32, intermediate_size=32,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
        max_position_embeddings=8192,
    )  # fmt: skip
    return MaclaurinForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return model_of()


@pytest.fixture
def saved(tmp_path, tokenizer):
    save_quietly(model_of(), tmp_path / "model", None)
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


# ------------------------------------------------------------------------------------------ budgets


def test_budgets_are_shares_or_bytes(model):
    def read(**wish):
        return read_budget(model.config, **{"memory": None, "constant": None, "at": 1000, **wish})

    original = 2 * 2 * 2 * 8 * 2 * 1000  # layers, heads, keys and values of 8, two bytes
    assert read(memory="25%").bytes == original // 4
    assert read(memory="100 %").original == original
    assert read(memory="1.5kB").bytes == 1500
    assert (read(constant="2KiB").bytes, read(constant="2KiB").constant) == (2048, True)
    for wrong in ("25", "0%", "5 apples", "-3MB", ""):
        with pytest.raises(InputError, match=r"25% or|more than 0"):
            read(memory=wrong)
    for more in ({"memory": "120%"}, {"memory": "900MB"}, {"constant": "1GB"}):
        with pytest.raises(
            InputError, match="limits nothing: all keys and values of 1,000 tokens take 128,000"
        ):
            read(**more)
    with pytest.raises(InputError, match="give one of"):
        read(memory="5%", constant="1MB")


RANKING = [(1, 0), (0, 1), (0, 0), (1, 1)]


def harm(memory, layer, head):
    """Head (1, 1) needs far keys most."""
    window = parse(memory).window
    return (1 + 9 * (layer == head == 1)) / (window.size + window.kept)


DAMAGE = TextDamage(
    {memory: [[harm(memory, n, h) for h in range(2)] for n in range(2)] for memory in memories_to_try(1000)}
)


@pytest.mark.parametrize("damage", [None, DAMAGE], ids=["equal", "by damage"])
@pytest.mark.parametrize("wish", [{"memory": "30%"}, {"memory": "90%"}, {"constant": "30kB"}])
@pytest.mark.slow
def test_plans_fill_the_budget_and_never_exceed_it(model, wish, damage):
    budget = read_budget(model.config, **{"memory": None, "constant": None, "at": 1000, **wish})
    plans = plans_for(model.config, budget, RANKING, damage)
    assert len(plans) > 2
    assert len({plan.attention for plan in plans}) == len(plans)
    for plan in plans:
        assert 0.9 * budget.bytes < plan.bytes <= budget.bytes, plan.name
        other = model_of(list(plan.attention)).bfloat16()
        cache = MaclaurinCache(other.config)
        with torch.no_grad():
            other(input_ids=torch.ones(1, 1000, dtype=torch.long), past_key_values=cache)
        assert cache.nbytes == plan.bytes
        assert cache.is_constant or not budget.constant


def test_bytes_go_to_the_heads_that_suffer_most_without(model):
    budget = read_budget(model.config, memory="30%", constant=None, at=1000)
    plan = next(p for p in plans_for(model.config, budget, RANKING, DAMAGE) if p.is_by_damage)
    assert plan.top == 0
    memories = {
        (n, h): group.spec.window
        for n, text in enumerate(plan.attention)
        for group in LayerAttention.read(text, 2).groups
        for h in group.heads
    }
    sizes = {place: window.size + window.kept for place, window in memories.items()}
    assert sizes[1, 1] > max(size for place, size in sizes.items() if place != (1, 1))


def test_a_head_that_looks_at_what_is_near_gets_a_window_alone(model):
    """Head (0, 0) suffers less from a window than from kept keys of the same bytes, the others more."""

    def harmed(memory, layer, head):
        window = parse(memory).window
        near = window.size + window.kept / 100 if (layer, head) == (0, 0) else window.size / 100 + window.kept
        return 1 / near

    memories = memories_to_try(1000)
    damage = TextDamage({m: [[harmed(m, n, h) for h in range(2)] for n in range(2)] for m in memories})
    budget = read_budget(model.config, memory="30%", constant=None, at=1000)
    plan = next(p for p in plans_for(model.config, budget, RANKING, damage) if p.top == 0)
    first, second = (LayerAttention.read(text, 2) for text in plan.attention)
    kept = {h: group.spec.window.kept for group in first.groups for h in group.heads}
    assert kept[0] == 0
    assert kept[1] > 0
    assert all(group.spec.window.kept for group in second.groups)


def test_where_memory_must_not_grow_some_heads_see_as_far_as_facts_are_asked_from(model):
    budget = read_budget(model.config, memory=None, constant="30kB", at=1000)
    plans = plans_for(model.config, budget, RANKING, DAMAGE, [150, 300])
    assert not any("window(150," in plan.of_top for plan in plans), "all heads can see that far"
    far = [plan for plan in plans if plan.of_top == "poly(0)+window(300,sinks=4)/sum"]
    assert len(far) == 2  # the others by damage, or equal
    for plan in far:
        assert plan.top == 1  # 40 % of the bytes
        assert plan.bytes <= budget.bytes
        named = [group.spec for text in plan.attention for group in LayerAttention.read(text, 2).groups]
        assert sum(spec.window.size == 300 for spec in named) == 1


def test_the_reach_of_questions_is_that_of_the_farthest_fact(tokenizer):
    questions = fact_questions(tokenizer, (64, 256), 2)
    reaches = reaches_of(questions)
    assert reaches == [max(q.tokens - q.fact.start for q in questions if q.distance == d) for d in (64, 256)]
    assert reaches[0] < reaches[1]


def test_damage_is_the_second_order_rise_of_the_divergence():
    """A head whose attention is unchanged does no damage; a smaller window does more than a larger one."""
    model = model_of()
    for block in model.model.layers:
        block.self_attn.o_proj.weight.data *= 0.1  # small changes, so that the second order is all there is
    rows = torch.randint(0, 256, (6, 60))
    windows = [f"poly(0)+window({size},sinks=1)/sum" for size in (4, 16, 60)]
    found = measure_damage(model, rows, windows, MeasureFile(None, {}))
    small, large, whole = (torch.tensor(found.of[window]) for window in windows)
    assert whole.max() < 1e-9
    assert (small > large).all()
    assert (large > 0).all()
    one = head_change(model, rows, windows[1])
    assert 0.4 * one < large[0, 1].item() < 2.5 * one  # next tokens are drawn, and only once


def head_change(model, rows, memory):
    """The divergence per token when head (0, 1) alone has this memory."""
    with torch.no_grad():
        before = model(input_ids=rows).logits.log_softmax(-1)
        with with_attention(model, [f"0: exp/sum; 1: {memory}", "exp/sum"]):
            after = model(input_ids=rows).logits.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_no_fact_is_cut_off_where_questions_are_asked_together(model, tokenizer, monkeypatch):
    questions = fact_questions(tokenizer, [40, 400], 4)
    read, own = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **given: read.append(given["input_ids"]) or own(**given))
    answers_together(model, questions, 10**6)
    rows = [tokenizer.decode(row) for batch in read for row in batch]
    assert len(rows) == len(questions)
    for question in questions:
        fact = tokenizer.decode(question.context[0, question.fact]).strip()
        assert sum(fact in row for row in rows) >= 2, "the same facts are asked at both distances"
    assert len(read) < len(questions)


def test_questions_asked_together_are_answered_as_one_by_one(model, tokenizer):
    questions = fact_questions(tokenizer, [40, 90], 3)
    found = answers_together(model, questions, 3000)
    for question, together in zip(questions, found, strict=True):
        (alone,) = answers_together(model, [question], 1)
        assert alone.log_odds == pytest.approx(
            float(question.log_odds(model, question.read(model))), abs=1e-4
        )
        assert abs(together.log_odds - alone.log_odds) < 0.3  # some text before the facts is cut off


def test_retrieval_heads_keep_more(model):
    memories = dict.fromkeys(RANKING, "poly(0)+window(9)/sum") | {RANKING[0]: "exp/sum"}
    assert attention_of(model.config, memories) == (
        "poly(0)+window(9)/sum",
        "0: exp/sum; 1: poly(0)+window(9)/sum",
    )
    assert bytes_of(model.config, ["exp/sum", "exp/sum"], 10) == 10 * 2 * 2 * 2 * 8 * 2


def test_a_budget_below_sinks_and_window_is_refused(model):
    for wish in ({"memory": "1%"}, {"constant": "2kB"}):
        budget = read_budget(model.config, **{"memory": None, "constant": None, "at": 1000, **wish})
        with pytest.raises(InputError, match="4 sinks and a window of 16 take"):
            plans_for(model.config, budget, RANKING)


# -------------------------------------------------------------------------------------------- heads


def odds_with_limited(model, question, limited=(), seen=None):
    """Log-odds from a full pass in which some heads' last rows are computed anew, by hand."""
    ids = torch.cat([question.context, question.prompt], dim=1)
    new, layers = question.prompt.shape[1], attention_layers(model)

    def attend(number, layer):
        def inner(q, k, v, gates, layout):
            y = type(layer).attend(layer, q, k, v, gates, layout).clone()
            for head in range(2):
                x = torch.einsum("tgd,sd->gts", q[0, :, 2 * head : 2 * head + 2], k[0, :, head]) / 8**0.5
                s, t = torch.arange(x.shape[-1]), torch.arange(x.shape[-1])[:, None]
                if seen is not None:
                    seen[number, head] = x[:, -1].softmax(-1)[:, question.fact].sum(-1).max()
                if (number, head) in limited:
                    near = (s <= t) & ((s > t - 64) | (s < 4))
                    weights = x.masked_fill(~near, -torch.inf).softmax(-1)
                    rows = torch.einsum("gts,se->tge", weights, v[0, :, head])
                    y[0, -new:, 2 * head : 2 * head + 2] = rows[-new:]
            return y

        return inner

    for number, layer in enumerate(layers):
        layer.attend = attend(number, layer)
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1, list(question.choices)].double()
    finally:
        for layer in layers:
            del layer.attend
    others = torch.cat([logits[: question.right], logits[question.right + 1 :]])
    return float(logits[question.right] - others.logsumexp(0))


def test_heads_are_measured_as_their_definition_says(model, tokenizer):
    (question,) = fact_questions(tokenizer, [100], 1)
    found = head_measures._ask(model, question)
    mass = {}
    assert found.log_odds == pytest.approx(odds_with_limited(model, question, seen=mass), abs=1e-5)
    for layer in range(2):
        for head in range(2):
            assert found.mass[layer][head] == pytest.approx(float(mass[layer, head]), abs=1e-5)
            expected = found.log_odds - odds_with_limited(model, question, [(layer, head)])
            assert found.loss[layer][head] == pytest.approx(expected, abs=1e-4)
    assert "password of" in tokenizer.decode(question.context[0, question.fact])


def test_heads_are_eliminated_in_the_order_in_which_they_are_missed_least(model, tokenizer, tmp_path):
    questions = fact_questions(tokenizer, [100], 3)
    best, other = [(0, 0), (0, 1), (1, 0)], (1, 1)
    file = MeasureFile.open(tmp_path / "measured.json", {}, resume=False)
    order = head_measures.eliminated(model, questions, best, file)

    def missed(places):
        odds = [odds_with_limited(model, question, [other, *places]) for question in questions]
        return sum(odds) / len(odds)

    last = max(best, key=lambda place: missed([place]))
    next_to_last = max((p for p in best if p != last), key=lambda place: missed([last, place]))
    assert order[1:] == [next_to_last, last]
    assert sorted(order) == best
    again = MeasureFile.open(tmp_path / "measured.json", {}, resume=True)
    assert head_measures.eliminated(None, questions, best, again) == order  # nothing is asked again


def test_both_measures_at_all_distances_make_the_score():
    near = Asked(64, 0, [[0.5, 0.0]], [[0.0, 2.0]], 0.0)
    far = Asked(512, 0, [[0.1, 0.0]], [[-1.0, 0.0]], 0.0)
    measures = HeadMeasures((near, far))
    assert measures.score.tolist() == [[0.5, 0.25]]
    assert measures.ranking == [(0, 0), (0, 1)]


def test_what_was_measured_is_not_measured_again(model, tokenizer, tmp_path, monkeypatch):
    questions, asked = fact_questions(tokenizer, [50], 3), []
    own = head_measures._ask

    def counted(*arguments):
        asked.append(arguments[1].number)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(head_measures, "_ask", counted)
    path, identity = tmp_path / "measured.json", {"weights": "a"}
    with pytest.raises(KeyboardInterrupt):
        measure_heads(model, questions, MeasureFile.open(path, identity, resume=False))
    found = measure_heads(model, questions, MeasureFile.open(path, identity, resume=True))
    assert asked == [0, 1, 2, 2]
    assert len(found.asked) == 3
    with pytest.raises(InputError, match="measured with weights a, but now it is b"):
        MeasureFile.open(path, {"weights": "b"}, resume=True)
    with pytest.raises(InputError, match="leave `resume` out"):
        MeasureFile.open(tmp_path / "other.json", identity, resume=True)


def test_the_plan_that_costs_least_is_taken(model, tokenizer):
    budget = read_budget(model.config, memory="30%", constant=None, at=500)
    plans = plans_for(model.config, budget, RANKING)[:3]
    file = MeasureFile(None, {})
    rows = torch.randint(0, 256, (1, 64))
    decision = decide(model, plans, rows, fact_questions(tokenizer, [50], 1), file)
    assert decision.best.cost == min(found.cost for found in decision.measured)
    assert len(decision.measured) == 3
    assert len(file.found) == 4  # and the original
    assert model.config.attention == "exp/sum"  # as it was


def test_only_the_best_plans_are_asked_many_questions(model, tokenizer, monkeypatch):
    from maclaurin.conversion import allocate

    monkeypatch.setattr(allocate, "FIRST_QUESTIONS", 2)
    budget = read_budget(model.config, memory="30%", constant=None, at=500)
    plans = plans_for(model.config, budget, RANKING)[:3]
    questions, file, shares = fact_questions(tokenizer, [20, 40], 3), MeasureFile(None, {}), []
    decision = decide(
        model, plans, torch.randint(0, 256, (1, 64)), questions, file, shares.append, finalists=2
    )
    assert [found.questions for found in decision.measured] == [6, 6, 2]
    assert decision.best is decision.measured[0]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    for found in decision.measured:
        with with_attention(model, found.plan.attention):
            answers = answers_together(model, questions[:2], 4096)
            answers += answers_together(model, questions[2 : found.questions], 4096)
        own = decision.original.answers[: found.questions]
        drops = torch.tensor([o.log_odds - a.log_odds for o, a in zip(own, answers, strict=True)]).double()
        assert found.log_odds == pytest.approx(sum(a.log_odds for a in answers) / len(answers), abs=1e-3)
        cost = found.loss - decision.original.loss + 0.1 * max(0.0, float(drops.mean()))
        assert found.cost == pytest.approx(cost, abs=1e-3)
        assert found.error == pytest.approx(0.1 * float(drops.std()) / found.questions**0.5, abs=1e-3)


SCORE = [[0.1, 0.9], [0.8, 0.7]]  # layer 1 is the better one, head (0, 1) the best


def test_references_of_all_kinds_fill_the_same_bytes(model):
    budget = read_budget(model.config, memory="80%", constant=None, at=1000)
    plans = {plan.kind: plan for plan in reference_plans(model.config, budget, SCORE)}
    assert list(plans) == [
        "window", "window + kept", "tail", "every key in some layers", "every key in some heads",
    ]  # fmt: skip
    assert set(plans) < set(METHODS)
    for plan in plans.values():
        assert 0.9 * budget.bytes < plan.bytes <= budget.bytes, plan.name
    layers = plans["every key in some layers"]
    assert [text == "exp/sum" for text in layers.attention] == [False, True]
    assert layers.name.startswith("1 layer exp/sum, others poly(0)+window(")
    assert layers.summary.startswith("1 layer exact; others ")
    heads = plans["every key in some heads"]
    assert heads.attention[0].endswith("1: exp/sum")
    assert heads.attention[1].startswith("0: exp/sum")


def test_references_for_a_small_or_a_constant_memory(model):
    """No tail if its state does not fit; no exact layer if one takes too much, or the cache may not grow."""
    small = read_budget(model.config, memory="5%", constant=None, at=1000)
    assert [p.kind for p in reference_plans(model.config, small, SCORE)] == ["window", "window + kept"]
    constant = read_budget(model.config, memory=None, constant="60kB", at=1000)
    kinds = [p.kind for p in reference_plans(model.config, constant, SCORE)]
    assert kinds == ["window", "window + kept", "tail"]


def test_references_are_measured_but_not_chosen(model, tokenizer, monkeypatch):
    from maclaurin.conversion import allocate

    monkeypatch.setattr(allocate, "FIRST_QUESTIONS", 2)
    budget = read_budget(model.config, memory="80%", constant=None, at=500)
    references = reference_plans(model.config, budget, SCORE)
    whole = MemoryPlan(4, "exp/sum", (), ("exp/sum", "exp/sum"), budget.original)
    plans, shares = [references[1]], []
    decision = decide(
        model,
        plans,
        torch.randint(0, 256, (1, 64)),
        fact_questions(tokenizer, [20], 3),
        MeasureFile(None, {}),
        shares.append,
        references=[*references, whole],
    )
    assert decision.best.plan == references[1]
    assert [found.plan for found in decision.measured] == plans
    assert [found.plan for found in decision.references] == [references[0], *references[2:], whole]
    assert {found.questions for found in decision.references} == {2}
    assert min(found.cost for found in decision.references) == pytest.approx(0, abs=1e-6)
    assert shares[-1] == 1


def test_memories_are_tried_up_to_the_length_that_the_memory_is_for():
    for length in (300, 1280, 4096):
        memories = memories_to_try(length)
        assert parse(memories[-1]).window.slots == length
        sizes = sorted({parse(m).window.size + parse(m).window.kept + 4 for m in memories})
        assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_a_memory_is_judged_at_the_length_it_is_for(model):
    assert distances_for(4096) == (256, 1024, 3072)
    assert distances_for(1280) == (128, 320, 960)  # nearer facts are inside the window of a limited head
    assert distances_for(100) == (75,)
    assert MemoryRequest(memory="30%", at=4096).length(model.config) == 4096
    assert MemoryRequest(memory="30%", at=10**6).length(model.config) == 8192  # what the model was made for
    assert MemoryRequest(constant="1MB").calibration_tokens(model.config) == 2 * 4096


def test_the_weight_of_recall_decides_between_plans(model, tokenizer, tmp_path):
    """One plan predicts text better, the other answers better: measures in the file, so nothing is run."""
    questions, rows = fact_questions(tokenizer, [50], 1), torch.zeros(1, 10, dtype=torch.long)
    plans = [MemoryPlan(0, "exp/sum", (name,), (name,), 10) for name in ("reads", "recalls")]
    known = {"reads": (1.01, -2.0), "recalls": (1.1, 1.0)}
    own = " | ".join(str(layer) for layer in model.config.layer_attention())
    measured = {own: (1.0, 1.0), **known}
    file = MeasureFile(None, {}, {
        f"plan on text [1, 10]: {name}": {"loss": loss, "answers": [[odds, odds > 0]] * len(questions)}
        for name, (loss, odds) in measured.items()
    })  # fmt: skip
    best = {w: decide(model, plans, rows, questions, file, recall_weight=w).best for w in (0.0, 0.1)}
    assert [best[w].plan.attention for w in (0.0, 0.1)] == [("reads",), ("recalls",)]
    assert best[0.1].cost == pytest.approx(0.1)


def test_a_large_budget_is_shared_by_damage_beyond_a_thousand_keys(model):
    """The ladder of sizes ends at the length of the text, not below what heads get."""
    memories = memories_to_try(4096)
    damage = TextDamage({m: [[harm(m, n, h) for h in range(2)] for n in range(2)] for m in memories})
    budget = read_budget(model.config, memory="50%", constant=None, at=4096)
    plan = next(p for p in plans_for(model.config, budget, RANKING, damage) if not p.top)
    low, high = (parse(memory).window.slots for memory in (plan.others[0], plan.others[-1]))
    assert high >= 1000
    assert high >= 2 * low


def test_few_exact_heads_with_the_others_by_damage_are_among_the_plans():
    """As on SmolLM2-135M at an eighth of the bytes of 1,280 tokens, where five exact heads recall most."""
    config = MaclaurinConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=10
    )
    ranking = [(layer, head) for layer in range(30) for head in range(3)]
    of = {m: [[harm(m, n, h) for h in range(3)] for n in range(30)] for m in memories_to_try(1280)}
    budget = read_budget(config, memory="12.5%", constant=None, at=1280)
    plans = plans_for(config, budget, ranking, TextDamage(of))
    assert {2, 3, 5, 7} <= {plan.top for plan in plans if plan.is_by_damage}


def test_no_candidate_leaves_much_of_the_budget_unused():
    config = MaclaurinConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=10
    )
    ranking = [(layer, head) for layer in range(30) for head in range(3)]
    budget = read_budget(config, memory=None, constant="32MB", at=4096)
    plans = plans_for(config, budget, ranking, None, [310, 1270, 3900])
    assert min(plan.bytes for plan in plans) > 0.9 * budget.bytes
    assert {plan.of_top for plan in plans if "window(3900," in plan.of_top}
    assert not any("window(310," in plan.of_top for plan in plans)


def test_the_map_names_the_keys_of_every_head():
    layers = [
        "0: exp/sum; 1: poly(0)+window(64,sinks=4,kept=192)/sum",
        "0: poly(0)+window(1024,sinks=4)/sum; 1: taylor(2,about=mean)+window(16,sinks=4)/sum",
    ]
    assert keys_of_heads(layers, 2) == [["all", "260"], ["1,028w", "20w+t"]]


@pytest.mark.parametrize(
    ("top", "of_top", "others", "words", "kind"),
    [
        (
            5,
            "exp/sum",
            ("poly(0)+window(32,sinks=4)/sum", "poly(0)+window(256,sinks=4,kept=768)/sum"),
            "5 exact; others 36–1,028 by damage",
            "every key in some heads",
        ),
        (
            0,
            "exp/sum",
            ("poly(0)+window(45,sinks=4,kept=134)/sum",),
            "all heads 183 (window 45, kept 134)",
            "window + kept",
        ),
        (
            9,
            "poly(0)+window(996,sinks=4)/sum",
            ("taylor(2,about=mean)+window(16,sinks=4)/sum",),
            "9 with 1,000 (window 996); others 20 (window 16, tail)",
            "long windows for some heads",
        ),
        (
            0,
            "exp/sum",
            ("taylor(2,about=mean)+window(64,sinks=4)/sum",),
            "all heads 68 (window 64, tail)",
            "tail",
        ),
        (0, "exp/sum", ("poly(0)+window(64,sinks=4)/sum",), "all heads 68 (window 64)", "window"),
        (4, "exp/sum", (), "4 exact; others none", "every key in some heads"),
    ],
)
def test_a_plan_is_summed_up_in_a_few_words(top, of_top, others, words, kind):
    plan = MemoryPlan(top, of_top, others, (), 0)
    assert plan.summary == words
    assert plan.kind == kind
    assert kind in METHODS


# --------------------------------------------------------------------------------------- conversions


def convert(saved, **more):
    settings = {
        "memory": "40%", "at": 400, "distances": [50], "questions": 1, "final_questions": 2,
        "text": saved / "text.txt", "lengths": [64], "device": "cpu", "progress": False, **more,
    }  # fmt: skip
    return maclaurin.convert(str(saved / "model"), saved / "small", **settings)


@pytest.mark.slow
def test_a_model_is_converted_to_its_budget(saved):
    result = convert(saved)
    chosen, conversion = result.chosen, result.conversion
    assert result.folder == saved / "small"
    small = MaclaurinForCausalLM.from_pretrained(saved / "small").bfloat16().eval()
    cache = MaclaurinCache(small.config)
    with torch.no_grad():
        small(input_ids=torch.ones(1, 400, dtype=torch.long), past_key_values=cache)
    assert cache.nbytes == chosen.decision.best.plan.bytes <= chosen.budget.bytes
    written = json.loads((saved / "small" / "conversion.json").read_text())
    assert written["chosen"]["budget"]["bytes"] == chosen.budget.bytes
    assert written["attention"] == list(conversion.choice.attention)
    assert sorted(p.name for p in saved.iterdir()) == ["model", "small", "text.txt"]
    page = (saved / "small" / "memory.html").read_text()
    assert "Retrieval heads" in page
    assert {"window", "tail"} <= {m["kind"] for m in written["chosen"]["references"]}
    assert "share of right answers" in page
    assert "References are simple plans" in page
    assert str(chosen.decision.best.plan.name.split(",")[0]) in page
    generated = small.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 8)


@pytest.mark.slow
def test_a_stopped_conversion_goes_on(saved, monkeypatch):
    from maclaurin.conversion import allocate

    own, calls = allocate.measured_with, []

    def stopping(*arguments):
        calls.append(arguments[1])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(allocate, "measured_with", stopping)
    with pytest.raises(KeyboardInterrupt):
        convert(saved)
    assert not (saved / "small").exists()
    assert (saved / ".small.measured.json").is_file()
    decision = convert(saved, resume=True).chosen.decision
    number = len(decision.measured) + len(decision.references)
    assert len(calls) == 3 + number - 1  # nothing twice but the one that was stopped
    assert not (saved / ".small.measured.json").exists()


@pytest.mark.slow
def test_a_dry_run_shows_a_frontier_and_its_measures_are_used_again(saved, monkeypatch):
    from maclaurin.conversion import allocate, head_measures

    shown = convert(saved, dry_run=True)
    assert shown.folder is None
    budgets = [budget.bytes for budget, _ in shown.chosen.frontier]
    assert budgets == sorted(budgets)
    assert [round(b / shown.chosen.budget.bytes, 2) for b in budgets] == [0.5, 1, 2]
    names = sorted(p.name for p in saved.iterdir())
    assert names == [".small.measured.json", "model", "small.plans.html", "text.txt"]

    def again(*arguments):
        raise AssertionError("measured again")

    monkeypatch.setattr(allocate, "measured_with", again)
    monkeypatch.setattr(head_measures, "_ask", again)
    result = convert(saved)
    assert result.chosen.decision == shown.chosen.decision
    assert (saved / "small" / "conversion.json").is_file()
    assert not (saved / ".small.measured.json").exists()


@pytest.mark.slow
def test_an_attention_is_given_and_trained_in_one_call(saved, monkeypatch):
    tail = "taylor(2,about=mean)+window(8,sinks=1)/sum"
    recovery = Recovery(text_steps=2, data=str(saved / "text.txt"), length=32, batch_size=2)
    given = {"memory": None, "attention": tail, "layers": "1", "recovery": recovery}
    seen = []
    result = convert(saved, **given, on_result=seen.append)
    assert seen == [result.conversion]
    assert result.conversion.choice.attention == ("exp/sum", tail)
    assert result.finished
    assert result.recovered.keys() == {"perplexity"}
    written = json.loads((saved / "small" / "conversion.json").read_text())
    assert written["perplexity"] == to_plain(result.recovered["perplexity"])
    assert written["recovery"]["settings"]["device"] == "cpu"
    monkeypatch.setattr(convert_model, "recover", None)  # nothing is left to train or to measure
    again = convert(saved, **given, resume=True)
    assert again.conversion is None
    assert again.was_finished
    assert again.recovered == result.recovered


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"attention": "exp/sum"}, "give one of `memory`"),
        ({"memory": "1%"}, "too small"),
        ({"layers": "1"}, "`layers` cannot be combined with a budget"),
        ({"sharp_attention": "exp/sum", "dry_run": True}, "`sharp_attention` cannot be combined"),
        ({"keep_sharp": "nowhere.json", "dry_run": True}, "`keep_sharp` cannot be combined"),
        ({"memory": None, "attention": "exp/l2", "sharp_attention": "exp/sum"}, "give `keep_sharp`"),
        ({"memory": "lots"}, "a number of bytes with a unit"),
        ({"resume": True}, "to resume from"),
        ({"distances": [2]}, "16 tokens or more"),
    ],
)
def test_errors_leave_nothing_behind(saved, more, words):
    with pytest.raises(InputError, match=words):
        convert(saved, **more)
    assert sorted(p.name for p in saved.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lengths": [64, 9000]}, "at 9000 tokens: .* Give a longer text"),
        ({"recovery": Recovery(text_steps=1, data="nowhere.txt")}, "no data called 'nowhere.txt'"),
        (
            {
                "memory": None,
                "attention": "poly(0)+window(8)/sum",
                "recovery": Recovery(kl_steps=1, data="no.txt"),
            },
            "no data called 'no.txt'",
        ),
    ],
)
def test_errors_known_beforehand_come_before_any_measure(saved, more, words, monkeypatch):
    def measured(*arguments, **settings):
        raise AssertionError("measured first")

    monkeypatch.setattr(convert_model, "choose_memory", measured)
    monkeypatch.setattr(convert_model, "convert_loaded", measured)
    with pytest.raises(MaclaurinError, match=words):
        convert(saved, **more)
    assert sorted(p.name for p in saved.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize(
    ("tokens", "shape"), [(20_000, (2, 4096)), (10_000, (1, 4096)), (6000, (1, 3952)), (2000, (1, 1000))]
)
def test_plans_are_measured_on_as_much_text_as_wanted(saved, tokens, shape, monkeypatch):
    """Two rows of `at` tokens if the text is long enough to measure on as well, else at least half of it."""

    class Seen(Exception):
        pass

    def rows_only(model, budget, questions, rows, *rest, **settings):
        raise Seen(tuple(rows.shape))

    monkeypatch.setattr(choose_memory, "choose_by", rows_only)
    (saved / "text.txt").write_text((TEXT * 4)[:tokens])
    with pytest.raises(Seen) as seen:
        convert(saved, at=4096)
    assert seen.value.args == (shape,)


def test_a_finished_folder_has_nothing_to_resume(saved):
    given = {"memory": None, "attention": "poly(0)+window(8)/sum"}
    convert(saved, **given)
    with pytest.raises(InputError, match=r"is finished: .* To train it, give `match_steps`"):
        convert(saved, **given, resume=True)
    with pytest.raises(InputError, match="is finished"):
        convert(saved, resume=True)
    small = saved / "small"
    read_conversion(small).with_training(Recovery(text_steps=9), 1.0).write(small)
    with pytest.raises(InputError, match="its recovery is not finished"):
        convert(saved, **given, resume=True)


def test_only_the_same_training_is_finished(saved):
    convert(saved, memory=None, attention="poly(0)+window(8)/sum")
    record = read_conversion(saved / "small").with_training(Recovery(text_steps=9, device="cpu"), 1.0)
    assert not record.has_finished(Recovery(text_steps=9))
    record = record.with_finished_training()
    assert record.has_finished(Recovery(text_steps=9))
    assert not record.has_finished(Recovery(text_steps=10))


def test_a_short_text_or_another_attention_is_refused(saved, tokenizer):
    (saved / "text.txt").write_text("too short " * 20)
    with pytest.raises(InputError, match="calibration text has"):
        convert(saved)
    save_quietly(model_of("taylor(2)/sum"), saved / "model", None)
    with pytest.raises(InputError, match="standard softmax attention"):
        convert(saved)
    (saved / "small").mkdir()
    with pytest.raises(InputError, match="exists already"):
        convert(saved)
