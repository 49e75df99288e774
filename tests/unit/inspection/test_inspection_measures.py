"""Every number of an inspection against a dense float64 computation written in the test."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from tests.unit.inspection import dense
from tests.unit.inspection.small import SETTINGS

from maclaurin import parse
from maclaurin.inspection.heads import Moments, Tally, tally_heads, visible


@pytest.fixture(scope="module")
def by_hand(model, contexts):
    """[layer][context] → q, k, v, x, seen, group."""
    layers = [[] for _ in range(model.config.num_hidden_layers)]
    for context in contexts:
        _, per_layer = dense.read(model, context.numpy())
        for layer, (q, k, v) in enumerate(per_layer):
            group = len(q) // len(k)
            keys, values = (np.repeat(u, group, axis=0) for u in (k, v))
            x = q @ keys.swapaxes(1, 2) / math.sqrt(q.shape[-1])
            layers[layer].append((k, v, values, x, np.tril(np.ones(x.shape[1:], dtype=bool))))
    return layers


def heads(inspection):
    return [(head, head.layer, head.head) for head in inspection.heads]


def test_there_is_a_record_for_every_head(inspection):
    assert [(h.layer, h.head, h.kv_head) for h in inspection.heads] == [
        (layer, head, head // 2) for layer in range(3) for head in range(4)
    ]


def test_scores_are_spread_as_they_are(inspection, by_hand):
    for record, layer, head in heads(inspection):
        scores = np.concatenate([x[head][seen] for *_, x, seen in by_hand[layer]])
        found = dataclasses.astuple(record.scores)
        assert found == pytest.approx((scores.mean(), scores.std(), scores.min(), scores.max()), rel=1e-4)
        assert sum(record.score_histogram.counts) == len(scores)
        start = record.score_histogram.start
        edges = start + np.arange(len(record.score_histogram.counts) + 1)
        assert np.abs(np.histogram(scores, edges)[0] - record.score_histogram.counts).max() <= 1


def test_rows_have_the_means_and_deviations_they_have(inspection, by_hand):
    for record, layer, head in heads(inspection):
        rows = [
            row[seen_row]
            for *_, x, seen in by_hand[layer]
            for row, seen_row in zip(x[head], seen, strict=True)
        ]
        means = np.array([row.mean() for row in rows])
        found = dataclasses.astuple(record.row_means)
        assert found == pytest.approx((means.mean(), means.std(), means.min(), means.max()), rel=1e-4)
        assert record.row_deviation == pytest.approx(np.mean([row.std() for row in rows]), rel=1e-4)
        assert sum(record.row_mean_histogram.counts) == len(rows)


@pytest.mark.parametrize("about", ["zero", "mean"])
def test_errors_by_order(inspection, by_hand, about):
    for record, layer, head in heads(inspection):
        for order in (0, 1, 2, 3, 7, 12):
            off, whole = 0.0, 0.0
            for *_, values, x, seen in by_hand[layer]:
                exact, cut = (
                    w @ values[head] / w.sum(-1, keepdims=True)
                    for w in (
                        dense.exp_weights(x[head], seen),
                        dense.taylor_weights(order, about)(x[head], seen),
                    )
                )
                off += ((cut - exact) ** 2).sum()
                whole += (exact**2).sum()
            assert record.errors(about)[order] == pytest.approx(math.sqrt(off / whole), rel=2e-3, abs=1e-9)


def test_sizes_of_terms(inspection, by_hand):
    for record, layer, head in heads(inspection):
        sizes = []
        for *_, values, x, seen in by_hand[layer]:
            v = values[head]
            total = np.linalg.norm(dense.exp_weights(x[head], seen) @ v, axis=-1)
            terms = [np.where(seen, x[head] ** n, 0.0) @ v / math.factorial(n) for n in range(13)]
            sizes.append(np.log([np.linalg.norm(term, axis=-1) / total for term in terms]))
        expected = np.exp(np.concatenate(sizes, axis=1).mean(1))
        assert record.terms == pytest.approx(expected, rel=1e-3)
        assert record.dominant_order == expected.argmax()


def test_sink_mass_leaves_out_rows_that_see_nothing_else(inspection, by_hand):
    for record, layer, head in heads(inspection):
        shares = []
        for *_, x, seen in by_hand[layer]:
            w = dense.exp_weights(x[head], seen)
            shares += list((w[:, 0] / w.sum(-1))[1:])
        assert record.sink_mass == pytest.approx(np.mean(shares), rel=1e-4)


def test_effective_ranks(inspection, by_hand):
    def rank(state):
        share = np.linalg.svd(state, compute_uv=False)
        share = share / share.sum()
        return np.exp(-(share * np.log(np.maximum(share, 1e-300))).sum())

    for record, layer, _ in heads(inspection):
        first, second = [], []
        for k, v, *_ in by_hand[layer]:
            keys, values = k[record.kv_head], v[record.kv_head]
            first.append(rank(keys.T @ values))
            pairs = (keys[:, :, None] * keys[:, None, :]).reshape(len(keys), -1)
            second.append(rank(pairs.T @ values))
        assert record.effective_rank_1 == pytest.approx(np.mean(first), rel=1e-4)
        assert record.effective_rank_2 == pytest.approx(np.mean(second), rel=1e-4)


def test_perplexity_of_every_trial(inspection, model, contexts):
    weighs = {
        "exp/sum": dense.exp_weights,
        **{f"taylor({n})/sum": dense.taylor_weights(n) for n in (2, 4, 12)},
        **{f"taylor({n},about=mean)/sum": dense.taylor_weights(n, "mean") for n in (1, 2, 4, 12)},
        "poly(0)+window(3,sinks=1)/sum": dense.window_weights(3, 1, None),
        **{f"taylor({n},about=mean)+window(3,sinks=1)/sum": dense.window_weights(3, 1, n) for n in (1, 2, 4)},
    }
    found = {row.attention: row for row in inspection.perplexity}
    assert found.pop("taylor(1)").perplexity is None, "its row sum can vanish"
    assert set(found) == set(weighs)
    predicted = sum(len(context) - 1 for context in contexts)
    for name, weigh in weighs.items():
        loss = sum(dense.read(model, context.numpy(), weigh)[0] for context in contexts) / predicted
        assert found[name].loss == pytest.approx(loss, rel=1e-5), name
        assert found[name].perplexity == pytest.approx(math.exp(loss), rel=1e-4), name


# ------------------------------------------------------------------------------------ blocks and sums


def random_qkv(tokens=23):
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, n, 6, generator=draw) for n in (4, 2, 2)]


def flat(tally: Tally):
    tensors = []
    for field in dataclasses.fields(tally):
        value = getattr(tally, field.name)
        tensors += list(vars(value).values()) if isinstance(value, Moments) else [value]
    return tensors


@pytest.mark.parametrize("chunk", [1, 4, 23, 100])
def test_chunk_size_never_changes_the_answer(chunk, monkeypatch):
    options = {"highest": 6, "sinks": 2}
    whole = tally_heads(parse("exp/sum"), *random_qkv(), chunk=23, **options)
    monkeypatch.setattr("maclaurin.inspection.heads.BLOCK", 1)  # one head at a time
    parts = tally_heads(parse("exp/sum"), *random_qkv(), chunk=chunk, **options)
    for a, b in zip(flat(whole), flat(parts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_moments_add_up():
    x = torch.randn(3, 40, dtype=torch.float64) * 5 + 1e6
    seen = torch.ones_like(x, dtype=torch.bool)
    total = Moments.of(x[:, :7], seen[:, :7]) + Moments.of(x[:, 7:], seen[:, 7:])
    torch.testing.assert_close(total.deviation, x.std(dim=1, correction=0), rtol=1e-9, atol=0)
    torch.testing.assert_close(total.mean, x.mean(1))


def test_a_bare_window_is_all_that_is_visible():
    seen = visible(parse("poly(0)+window(3,sinks=1)/sum"), 4, 6, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 0, 1, 1, 1, 0], [1, 0, 0, 1, 1, 1]]
    assert visible(parse("taylor(2)+window(3)/sum"), 4, 6, torch.device("cpu")).int().sum() == 11


def test_large_scores_and_high_orders_stay_numbers():
    q, k, v = random_qkv()
    tally = tally_heads(parse("exp/sum"), q * 20, k * 20, v, highest=170, sinks=1, chunk=8)
    assert tally.squared_error_mean.isfinite().all()
    assert tally.log_terms.isfinite().all()


def test_settings_of_this_suite_reach_all_kinds():
    assert SETTINGS.tail_orders == (1, 2, 4)
