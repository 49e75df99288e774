"""Analysis of variance against textbook sums and against projections written another way."""

import itertools

import numpy as np
import pytest
from tests.unit.report.synthetic import experiment

from maclaurin.report.anova import Factorial
from maclaurin.report.distributions import f_tail
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import effect_sentence

LEVELS = {"kernel": ("exp", "taylor", "linear"), "norm": ("sum", "l2"), "gate": ("none", "out")}


def factorial(mean, seeds=3, noise=0.1, axes=("kernel", "norm"), drop=(), seed=0, metric="test_loss"):
    """A factorial whose cells have the means that `mean(levels)` says."""
    rng = np.random.default_rng(seed)
    shifts = rng.normal(0, 1, seeds)
    values, levels = {}, {}
    for combination in itertools.product(*(LEVELS[axis] for axis in axes)):
        cell = " ".join(combination)
        levels[cell] = dict(zip(axes, combination, strict=True))
        row = mean(levels[cell]) + shifts + rng.normal(0, noise, seeds)
        values[cell] = [None if (cell, s) in drop else float(v) for s, v in enumerate(row)]
    record, runs = experiment(values, axes=axes, levels=levels, metric=metric)
    return Factorial(Outcome(record, runs))


def main_only(levels):
    return {"exp": 0.0, "taylor": 1.0, "linear": 2.0}[levels["kernel"]]


def twisted(levels):
    return main_only(levels) + (3.0 if levels.get("norm") == "l2" and levels["kernel"] == "exp" else 0.0)


def array_of(analysis):
    """[kernel, norm, seed]."""
    cells = analysis.outcome.cells
    rows = [[list(cells[f"{k} {n}"].values.values()) for n in LEVELS["norm"]] for k in LEVELS["kernel"]]
    return np.array(rows)


def test_balanced_sums_of_squares_are_the_textbook_ones():
    analysis = factorial(twisted)
    y = array_of(analysis)
    a, b, s = y.shape
    grand, cell = y.mean(), y.mean(2)
    rows, columns, seeds = y.mean((1, 2)), y.mean((0, 2)), y.mean((0, 1))
    expected = {
        "kernel": b * s * ((rows - grand) ** 2).sum(),
        "norm": a * s * ((columns - grand) ** 2).sum(),
        "kernel × norm": s * ((cell - rows[:, None] - columns + grand) ** 2).sum(),
        "seed": a * b * ((seeds - grand) ** 2).sum(),
        "noise": ((y - cell[..., None] - seeds + grand) ** 2).sum(),
    }
    found = {effect.name: effect for effect in (*analysis.effects, *analysis.left_over)}
    assert analysis.is_balanced
    assert {name: effect.sum for name, effect in found.items()} == pytest.approx(expected)
    assert sum(effect.share for effect in found.values()) == pytest.approx(1.0)
    assert [found[n].df for n in expected] == [2, 1, 2, 2, 10]
    f = (expected["kernel"] / 2) / (expected["noise"] / 10)
    assert found["kernel"].f == pytest.approx(f)
    assert found["kernel"].p >= f_tail(f, 2, 10)


def contrasts(labels, levels):
    """Sum-to-zero coding: another basis for the same space."""
    basis = np.vstack([np.eye(len(levels) - 1), -np.ones(len(levels) - 1)])
    return basis[[levels.index(label) for label in labels]]


def residual(columns, y):
    x = np.column_stack([np.ones(len(y)), *columns])
    return float(((y - x @ np.linalg.lstsq(x, y, rcond=None)[0]) ** 2).sum())


def test_missing_runs_keep_the_definition():
    """Type II, by least squares in another coding."""
    analysis = factorial(twisted, drop={("exp sum", 0), ("linear l2", 2), ("linear l2", 1)})
    points = [
        (c.levels["kernel"], c.levels["norm"], s, v)
        for c in analysis.outcome.cells.values()
        for s, v in c.values.items()
    ]
    kernels, norms, seeds, y = zip(*points, strict=True)
    y = np.array(y)
    k, n = contrasts(kernels, LEVELS["kernel"]), contrasts(norms, LEVELS["norm"])
    s = contrasts(seeds, (0, 1, 2))
    kn = np.einsum("pi,pj->pij", k, n).reshape(len(y), -1)
    expected = {
        "kernel": residual([s, n], y) - residual([s, n, k], y),
        "norm": residual([s, k], y) - residual([s, k, n], y),
        "kernel × norm": residual([s, k, n], y) - residual([s, k, n, kn], y),
    }
    assert {effect.name: effect.sum for effect in analysis.effects} == pytest.approx(expected)
    assert analysis.noise == pytest.approx(residual([s, k, n, kn], y) / (15 - 8))
    assert not analysis.is_balanced


def test_a_combination_that_never_ran_takes_a_degree_of_freedom():
    gone = {("linear l2", s) for s in range(3)}
    analysis = factorial(main_only, drop=gone)
    assert [(effect.name, effect.df) for effect in analysis.effects] == [
        ("kernel", 2),
        ("norm", 1),
        ("kernel × norm", 1),
    ]


def test_a_level_that_never_ran_is_not_estimated():
    gone = {(f"{k} l2", s) for k in LEVELS["kernel"] for s in range(3)}
    analysis = factorial(main_only, drop=gone)
    assert [effect.name for effect in analysis.effects] == ["kernel"]
    assert analysis.inestimable == ("norm", "kernel × norm")


def test_only_what_is_there_is_found():
    analysis = factorial(main_only, noise=0.05)
    found = {effect.name: effect.supported for effect in analysis.effects}
    assert found == {"kernel": True, "norm": False, "kernel × norm": False}


def test_noise_alone_seldom_finds_anything():
    wrong = sum(
        any(
            effect.supported
            for effect in factorial(lambda _: 0.0, axes=tuple(LEVELS), seed=i, seeds=2).effects
        )
        for i in range(60)
    )
    assert wrong <= 8


def test_three_axes_have_higher_interactions_together():
    analysis = factorial(
        lambda at: 5.0 * (tuple(at.values()) == ("exp", "l2", "out")),
        axes=tuple(LEVELS),
    )
    higher = analysis.effects[-1]
    assert (higher.name, higher.df) == ("higher interactions", 2)
    assert higher.supported
    assert "Three or more parts act together" in effect_sentence(analysis, higher)


def test_sentences_say_what_the_numbers_support():
    analysis = factorial(twisted, noise=0.05)
    sentences = {effect.name: effect_sentence(analysis, effect) for effect in analysis.effects}
    assert "What kernel does depends on norm" in sentences["kernel × norm"]
    assert "from exp to" in sentences["kernel × norm"]
    plain = factorial(main_only, noise=0.05)
    sentences = {effect.name: effect_sentence(plain, effect) for effect in plain.effects}
    assert "exp is best; linear is last, +" in sentences["kernel"]
    assert "not distinguishable at this budget" in sentences["norm"]
    assert "not distinguishable at this budget" in sentences["kernel × norm"]


def test_levels_that_cannot_be_told_apart_lead_together():
    def two_good(levels):
        return 2.0 if levels["kernel"] == "linear" else 0.0

    analysis = factorial(two_good, noise=0.05)
    sentence = effect_sentence(analysis, analysis.effects[0])
    assert "lead and are not distinguishable from each other; linear is last" in sentence


def test_higher_accuracy_is_better():
    analysis = factorial(lambda levels: 0.2 * main_only(levels), noise=0.01, metric="accuracy")
    assert "linear is best; exp is last, −" in effect_sentence(analysis, analysis.effects[0])


def test_one_seed_supports_nothing():
    analysis = factorial(twisted, seeds=1)
    assert analysis.noise is None
    assert all("one seed only" in effect_sentence(analysis, effect) for effect in analysis.effects)
