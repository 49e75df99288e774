"""Analysis of variance against textbook sums and against statsmodels."""

import itertools

import numpy as np
import pandas
import pytest
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from tests.unit.report.synthetic import experiment, study

from maclaurin.report.anova import Factorial
from maclaurin.report.outcome import Outcome
from maclaurin.report.sentences import effect_sentence

LEVELS = {"kernel": ("exp", "taylor", "linear"), "norm": ("sum", "l2"), "gate": ("none", "out")}


def factorial(mean, seeds=3, noise=0.1, axes=("kernel", "norm"), drop=(), seed=0, metric="loss", scale=None):
    """A factorial whose cells have the means that `mean(levels)` says."""
    rng = np.random.default_rng(seed)
    shifts = rng.normal(0, 1, seeds)
    values, levels = {}, {}
    for combination in itertools.product(*(LEVELS[axis] for axis in axes)):
        cell = " ".join(combination)
        levels[cell] = dict(zip(axes, combination, strict=True))
        row = mean(levels[cell]) + shifts + rng.normal(0, noise, seeds)
        values[cell] = [None if (cell, s) in drop else float(v) for s, v in enumerate(row)]
    made = experiment(values, axes=axes, levels=levels, metric=metric, scale=scale)
    return Factorial(Outcome(study(made), made[0]))


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
    assert found["kernel"].p >= 0.999 * stats.f.sf(f, 2, 10)


@pytest.mark.parametrize("drop", [set(), {("exp sum", 0), ("linear l2", 2), ("linear l2", 1)}])
def test_sums_and_tests_are_those_of_statsmodels(drop):
    """Type II, with and without runs that are missing."""
    analysis = factorial(twisted, drop=drop)
    rows = [
        {**cell.levels, "seed": str(seed), "y": value}
        for cell in analysis.outcome.cells.values()
        for seed, value in cell.values.items()
    ]
    table = anova_lm(ols("y ~ C(seed) + C(kernel) * C(norm)", pandas.DataFrame(rows)).fit(), typ=2)
    expected = {
        "kernel": table.loc["C(kernel)"],
        "norm": table.loc["C(norm)"],
        "kernel × norm": table.loc["C(kernel):C(norm)"],
    }
    for effect in analysis.effects:
        line = expected[effect.name]
        assert effect.sum == pytest.approx(line["sum_sq"])
        assert effect.df == line["df"]
        assert effect.f == pytest.approx(line["F"])
    assert analysis.noise == pytest.approx(table.loc["Residual", "sum_sq"] / table.loc["Residual", "df"])
    assert analysis.is_balanced == (not drop)


def test_a_contrast_has_one_value_per_seed():
    analysis = factorial(twisted)
    y = array_of(analysis)
    by_seed = (y[1, 1] - y[0, 1]) - (y[1, 0] - y[0, 0])
    found = analysis.seed_contrast({"kernel": ("exp", "taylor"), "norm": ("sum", "l2")})
    expected = stats.t.interval(0.95, 2, by_seed.mean(), stats.sem(by_seed))
    assert (found.value, found.bounds) == (pytest.approx(by_seed.mean()), pytest.approx(expected))
    main = analysis.seed_contrast({"kernel": ("exp", "linear")})
    assert main.value == pytest.approx((y[2] - y[0]).mean())
    step = analysis.seed_contrast({"kernel": ("exp", "linear")}, at={"norm": "l2"})
    assert step.value == pytest.approx((y[2, 1] - y[0, 1]).mean())


def test_a_contrast_is_averaged_where_all_of_its_cells_exist():
    gone = {("linear l2", s) for s in range(3)}
    analysis = factorial(main_only, drop=gone)
    assert analysis.seed_contrast({"kernel": ("taylor", "linear"), "norm": ("sum", "l2")}) is None
    cells = analysis.outcome.cells
    expected = np.subtract(list(cells["linear sum"].values.values()), list(cells["exp sum"].values.values()))
    assert analysis.seed_contrast({"kernel": ("exp", "linear")}).value == pytest.approx(expected.mean())


def test_pooled_noise_alone_decides_nothing():
    """One cell varies much, the others little: F finds an interaction that the seeds do not show."""
    steady = {f"{k} {n}": [0.0, 0.001, -0.001] for k in LEVELS["kernel"] for n in LEVELS["norm"]}
    values = {**steady, "exp l2": [0.3, 0.1, 0.2]}
    levels = {f"{k} {n}": {"kernel": k, "norm": n} for k in LEVELS["kernel"] for n in LEVELS["norm"]}
    made = experiment(values, axes=("kernel", "norm"), levels=levels)
    analysis = Factorial(Outcome(study(made), made[0]))
    effect = analysis.effects[-1]
    assert effect.name == "kernel × norm"
    assert effect.p < 0.05 < effect.p_by_seed
    assert not effect.supported
    assert "undecided" in effect_sentence(analysis, effect)


def test_a_run_that_diverged_leaves_every_effect_undecided():
    steady = factorial(twisted)
    values = {name: list(cell.values.values()) for name, cell in steady.outcome.cells.items()}
    levels = {name: dict(cell.levels) for name, cell in steady.outcome.cells.items()}
    values["exp l2"][1] = None
    made = experiment(values, axes=("kernel", "norm"), levels=levels, statuses={("exp l2", 1): "diverged"})
    analysis = Factorial(Outcome(study(made), made[0]))
    assert analysis.diverged == ("exp l2",)
    assert not any(effect.supported for effect in analysis.effects)
    assert all("exp l2 diverged" in effect_sentence(analysis, effect) for effect in analysis.effects)


def test_cells_with_different_spreads_are_noticed():
    calm = factorial(main_only, seeds=5)
    assert not calm.spreads_differ
    record = calm.outcome.cells
    values = {name: list(cell.values.values()) for name, cell in record.items()}
    values["exp sum"] = [v + (-1) ** s * 3 for s, v in enumerate(values["exp sum"])]
    levels = {name: dict(cell.levels) for name, cell in record.items()}
    made = experiment(values, axes=("kernel", "norm"), levels=levels)
    assert Factorial(Outcome(study(made), made[0])).spreads_differ


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
    assert "undecided" in sentences["norm"]
    assert "undecided" in sentences["kernel × norm"]


def test_levels_that_cannot_be_told_apart_lead_together():
    def two_good(levels):
        return 2.0 if levels["kernel"] == "linear" else 0.0

    analysis = factorial(two_good, noise=0.05)
    sentence = effect_sentence(analysis, analysis.effects[0])
    assert "lead, and which of them is better is undecided; linear is last" in sentence


def test_higher_accuracy_is_better():
    analysis = factorial(
        lambda levels: 0.2 * main_only(levels), noise=0.01, metric="accuracy", scale="linear"
    )
    assert "linear is best; exp is last, −" in effect_sentence(analysis, analysis.effects[0])


def test_one_seed_supports_nothing():
    analysis = factorial(twisted, seeds=1)
    assert analysis.noise is None
    assert all("one seed only" in effect_sentence(analysis, effect) for effect in analysis.effects)
