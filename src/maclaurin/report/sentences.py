"""Sentences that state only what the numbers support."""

from __future__ import annotations

import itertools
import math

from maclaurin.report.anova import Effect, Factorial
from maclaurin.report.contributions import Contributions, PairEffect
from maclaurin.report.formatting import (
    chance,
    counted,
    interval,
    listed,
    listed_cells,
    many,
    plain,
    power,
    ratio,
    share,
    signed,
)
from maclaurin.report.ladder import GROWS, SHRINKS, TURNS, Ladder, Line, RankStep, Trend
from maclaurin.report.ladder import UNDECIDED as OPEN
from maclaurin.report.learning_rates import best_rate, parabola_at, trial_means, tuned_steps, tuning_sign
from maclaurin.report.outcome import Outcome
from maclaurin.report.statistics import CONFIDENCE
from maclaurin.report.verdict import AGREES, DISAGREES, NOT_RUN, UNDECIDED, Judgement
from maclaurin.study.run_record import FormsRecord, RunRecord, StudyRecord, Tuning, error_line
from maclaurin.wording import in_list

SHORT = {AGREES: "agree", DISAGREES: "disagree", UNDECIDED: "undecided", NOT_RUN: "not run"}


# ------------------------------------------------------------------------------------- the study


def status_sentence(study: StudyRecord) -> str:
    """56 of 60 runs finished; 2 diverged, 1 crashed, 1 without a result yet."""
    planned = planned_runs(study)
    counts = {status: len(study.having(status)) for status in ("finished", "diverged", "crashed", "running")}
    absent = planned - sum(counts.values())
    rest = [f"{counts[s]} {s}" for s in ("diverged", "crashed", "running") if counts[s]]
    if absent:
        rest.append(f"{absent} without a result yet")
    return f"{counts['finished']} of {counted(planned, 'run')} finished" + (
        f"; {', '.join(rest)}" if rest else ""
    )


def planned_runs(study: StudyRecord) -> int:
    """Cells × seeds of all experiments; runs shared by experiments count once."""
    planned = [
        cell.runs.get(seed, (e.name, cell.name, seed))
        for e in study.experiments
        for cell, seed in itertools.product(e.cells, e.seeds)
    ]
    return len(set(planned))


def trouble(study: StudyRecord) -> list[str]:
    """One line for each run that did not finish and each planned run that has no record."""
    found = list(study.labelled())
    lines = [
        f"{label}: {_became(record)}" + (f" ({error_line(record.message)})" if record.message else "")
        for label, record in found
        if record.status != "finished"
    ]
    metrics = {e.name: (e.metric, e.metric_title) for e in study.experiments}
    lines += [
        f"{label}: finished without {metrics[label.experiment][1]}"
        for label, record in found
        if record.status == "finished" and record.value(metrics[label.experiment][0]) is None
    ]
    there = {label for label, _ in found}
    for e in study.experiments:
        lines += [
            f"{e.name} · {cell.name} · seed {seed}: no record"
            for cell, seed in itertools.product(e.cells, e.seeds)
            if (e.name, cell.name, seed) not in there
        ]
    return lines


def _became(record: RunRecord) -> str:
    if record.status in ("diverged", "crashed", "stopped", "running"):
        return f"{record.status} at step {record.step:,} of {record.run.steps:,}"
    return "waiting"


def verdict_counts(judgements: list[Judgement]) -> str:
    """5 agree, 1 disagrees, 2 undecided."""
    counts = {v: sum(j.verdict == v for j in judgements) for v in (AGREES, DISAGREES, UNDECIDED, NOT_RUN)}
    parts = []
    for verdict, count in counts.items():
        if count:
            word = SHORT[verdict]
            parts.append(f"{count} {word + 's' if count == 1 and word.endswith('agree') else word}")
    return ", ".join(parts)


def headline(study: StudyRecord, judgements: list[Judgement]) -> str:
    """One line for the terminal."""
    claims = f" Of {counted(len(judgements), 'claim')}: {verdict_counts(judgements)}." if judgements else ""
    return f"{study.name}: {status_sentence(study)}.{claims}"


def forms_finding(forms: FormsRecord) -> str:
    """How well the forms agree, and how fast the series converges to softmax."""
    errors = [e for row in forms.agreement if (e := row.get("error")) is not None]
    text = f"The forms agree to {power(max(errors))}." if errors else ""
    series = sorted((r for r in forms.series if r.get("error") is not None), key=lambda r: r["order"])
    if len(series) > 1:
        first, last = series[0], series[-1]
        text += (
            f" The series differs from softmax by {power(first['error'])} at order {first['order']} and by "
            f"{power(last['error'])} at order {last['order']}."
        )
    return text.strip()


def experiment_finding(outcome: Outcome) -> str:
    """Which cells are ahead of the baseline, which behind, and which undecided."""
    experiment = outcome.experiment
    head = f"{experiment.title}: "
    if not any(cell.values for cell in outcome.cells.values()):
        return head + "no run has finished yet."
    if outcome.most_seeds < 2:
        return head + f"one seed only, so there are {outcome.metric} values but no conclusions."
    spread = outcome.baseline.spread
    if spread is None:
        return head + f"{experiment.baseline}, which the others are compared with, has no finished run yet."
    groups = {s: [] for s in ("ahead", "undecided", "behind")}
    for name in outcome.best_first():
        standing = outcome.standing(name)
        if standing in groups:
            groups[standing].append(name)
    sd = "" if spread.deviation is None else f" ± {plain(spread.deviation)}"
    text = head + f"{experiment.baseline} has {_a(outcome.metric)} of {plain(spread.mean)}{sd}"
    parts = [
        f"{listed_cells(_some(names))} {_is(names)} {word}" + _range(outcome, names, standing)
        for standing, word in (("ahead", "better"), ("undecided", "undecided"), ("behind", "behind"))
        if (names := groups[standing])
    ]
    return text + ("; " + "; ".join(parts) if parts else "") + "."


def tuning_finding(outcome: Outcome) -> str:
    """Where the learning rates come from, and how they differ."""
    tuning = outcome.experiment.tuning
    if tuning is None or not tuning.cells:
        return ""
    if tuning.rule:
        return f"{outcome.experiment.title}: {_rule_text(tuning, tuning_sign(tuning))}"
    rates = [cell.rate for cell in tuning.cells.values()]
    spread = f"all {rates[0]:g}" if len(set(rates)) == 1 else f"{min(rates):g} to {max(rates):g}"
    text = (
        f"{outcome.experiment.title}: each cell trains at its own learning rate ({spread}), chosen by "
        f"{tuning.metric.replace('_', ' ')} in {tuning.source}"
    )
    factors = [cell.factor for cell in tuning.cells.values() if cell.factor is not None]
    if factors:
        spread = (
            f"{factors[0]:g} for all" if len(set(factors)) == 1 else f"{min(factors):g} to {max(factors):g}"
        )
        text += (
            f". The rate of the output projections of attention is chosen too, as a factor of it ({spread})"
        )
    steps = {found for name in tuning.cells if (found := tuned_steps(outcome, name)) is not None}
    if steps:
        shown = listed([f"{count:,}" for count in sorted(steps)])
        text += f". Some rates were tuned at {shown} steps, and their runs took another number of steps"
    read = {record.content for cell in outcome.cells.values() for record in cell.records.values()} - {""}
    if tuning.data and not read <= set(tuning.data):
        text += (
            ". The rates were chosen on other data than these runs read, so a close choice may differ here"
        )
    return text + "."


def rate_cautions(outcome: Outcome) -> list[str]:
    """What the error of a learning rate may cost; empty without tuning runs."""
    tuning = outcome.experiment.tuning
    if tuning is None or not any(cell.trials for cell in tuning.cells.values()):
        return []
    sign = tuning_sign(tuning)
    found = [
        parabola.half_step
        for cell in tuning.cells.values()
        if (parabola := parabola_at(trial_means(cell, sign), best_rate(cell, sign), sign)) is not None
    ]
    text = "Intervals of differences are over seeds: they do not include the error of a learning rate."
    if found:
        text += (
            " Rates are tried in factors of two. By a parabola through the best rate and its neighbours, a "
            f"rate half a step (a factor of √2) from the best costs {plain(min(found))} to "
            f"{plain(max(found))} in {tuning.metric.replace('_', ' ')}."
        )
    return [text]


def _rule_text(tuning: Tuning, sign: float) -> str:
    """The rule, and how it compares with the other rates tried."""
    rates = sorted({cell.rate for cell in tuning.cells.values()})
    text = f"learning rates ({' to '.join(f'{rate:g}' for rate in rates[:: len(rates) - 1 or 1])}) "
    text += f"come from a rule: {tuning.rule}."
    halved = [f"{name} ({cell.rate:g})" for name, cell in tuning.cells.items() if cell.diverged]
    if halved:
        text += f" Final runs diverged at that rate, so that it was halved: {listed(halved)}."
    best = {name: rate for name, cell in tuning.cells.items() if (rate := best_rate(cell, sign))}
    if not best:
        return text + " No other rates were tried here."
    right = [name for name, rate in best.items() if rate == tuning.cells[name].rate]
    wrong = []
    for name, rate in best.items():
        values = trial_means(tuning.cells[name], sign)
        if name not in right:
            gained = abs(values[tuning.cells[name].rate] - values[rate])
            by = f" by {plain(gained)}" if math.isfinite(gained) else ", as a run diverged at the rule's rate"
            wrong.append(f"{name} is better at {rate:g}{by}")
    seeds = {trial.seed for cell in tuning.cells.values() for trial in cell.trials}
    text += (
        f" Of the {counted(len(best), 'cell')} with other rates tried ({counted(len(seeds), 'seed')}), "
        f"{listed(right) or 'none'} {_is(right or [''])} best at the rule's rate"
    )
    return text + (f"; {listed(wrong)}" if wrong else "") + "."


def factorial_finding(factorial: Factorial) -> str:
    """The significant effects, largest first; empty if no effect can be tested."""
    tested = [effect for effect in factorial.effects if effect.p is not None]
    if not tested:
        return ""
    found = sorted((e for e in tested if e.supported), key=lambda e: -e.share)
    others = [effect.name for effect in tested if not effect.supported]
    parts = [f"{effect.name} explains {share(effect.share)} of the variance" for effect in found[:1]]
    parts += [f"{effect.name} {share(effect.share)}" for effect in found[1:]]
    text = ", ".join(parts)
    if others:
        text += ("; " if text else "") + f"{listed(others)} {_is(others)} undecided"
    return f"{factorial.outcome.experiment.title}: {text}."


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


#: the most names in a list of cells
MOST_NAMES = 4


def _some(names: list[str]) -> list[str]:
    if len(names) <= MOST_NAMES:
        return names
    return [*names[: MOST_NAMES - 1], f"{len(names) - MOST_NAMES + 1} others"]


def _range(outcome: Outcome, names: list[str], standing: str) -> str:
    """' by 0.12 to 0.45', if the standing is decided."""
    differences = [d.value for name in names if (d := outcome.differences[name]) is not None]
    sizes = sorted(abs(value) for value in differences if math.isfinite(value))
    if standing == "undecided" or not sizes:
        return ""
    unit = f" {outcome.difference_unit}" if outcome.difference_unit else ""
    return f" by {plain(sizes[0])}" + (f" to {plain(sizes[-1])}" if len(sizes) > 1 else "") + unit


# -------------------------------------------------------------------------------- the waterfalls


def waterfall_finding(found: Contributions) -> str:
    """The gap, and the parts that contribute most to it."""
    way, outcome = found.waterfall, found.outcome
    head = f"{way.title} ({outcome.experiment.name}): "
    if not found.parts:
        return f"{head}there is nothing to add up. {diverged_sentence(found)}"
    unit = f" {outcome.difference_unit}" if outcome.difference_unit else ""
    first, last = found.spread(way.start), found.spread(way.end)
    text = (
        f"{head}from {plain(first and first.mean)} ({way.start}) to "
        f"{plain(last and last.mean)} ({way.end}) in {outcome.metric}, "
        f"{signed(found.gap.value)} {interval(found.gap.bounds)}{unit}".rstrip()
    )
    if len(found.seeds) < 2 and not found.diverged:
        return text + "; one seed only, so nothing can be concluded about the parts."
    helps = -1 if not outcome.higher_is_better else 1
    ranked = sorted(found.parts, key=lambda part: -helps * part.size.value)
    sure = [part for part in ranked if part.supported]
    rest = [part.switch for part in ranked if not part.supported]
    if sure:
        text += ", of which " + listed([f"{part.switch} {signed(part.size.value)}" for part in sure])
    if rest:
        text += f"; what {listed(rest)} {'contributes' if len(rest) == 1 else 'contribute'} is undecided"
    return text + f" (averaged over {counted(way.orders, 'order')} of adding them)."


def waterfalls_finding(ways: list[Contributions]) -> str:
    """One waterfall for all of its metrics: the gap, and the parts whose contribution is decided."""
    return f"{ways[0].waterfall.title}: {'; '.join(_gap_text(way) for way in ways)}."


def _gap_text(found: Contributions) -> str:
    if not found.parts:
        return f"{found.outcome.metric} unknown, as cells diverged"
    unit = f" {found.outcome.difference_unit}" if found.outcome.difference_unit else ""
    text = f"{found.outcome.metric} {signed(found.gap.value)} {interval(found.gap.bounds)}".rstrip() + unit
    sure = sorted((part for part in found.parts if part.supported), key=lambda part: -abs(part.size.value))
    if sure:
        return text + ", of which " + listed([f"{part.switch} {signed(part.size.value)}" for part in sure])
    return text + " (no part decided)"


def diverged_sentence(found: Contributions) -> str:
    """Which cells of a waterfall diverged, and what that means for its numbers; empty if none did."""
    if not found.diverged:
        return ""
    cells = [
        f"{in_list(cell)} (seed {listed([str(seed) for seed in seeds])})"
        for cell, seeds in found.diverged.items()
    ]
    if not found.parts:
        return f"{listed(cells)} diverged, and no seed finished in every cell."
    return (
        f"{listed(cells)} diverged. Contributions that need such a cell are means over the other seeds, "
        "which leave out a bad result: they have no interval and no p, are not decided, and need not add up."
    )


#: the most interactions that a page describes in words; its table has all of them
MOST_INTERACTIONS = 4


def interaction_sentences(found: Contributions) -> list[str]:
    """The pairs with a significant interaction, the largest first."""
    if not any(effect.p is not None for effect in found.interactions):
        return []
    sure = [effect for effect in found.interactions if effect.supported]
    if not sure:
        return [
            "Whether any two parts need or replace each other is undecided: no interaction is significant."
        ]
    return [_pair_sentence(found, effect) for effect in sure[:MOST_INTERACTIONS]]


def _pair_sentence(found: Contributions, effect: PairEffect) -> str:
    first, second = effect.pair.first, effect.pair.second
    contrast = effect.interaction_contrast
    better = contrast.value * (1 if found.outcome.higher_is_better else -1) > 0
    word = "help each other" if better else "stand in for each other"
    p = "" if effect.p is None else f", {chance(effect.p)}"
    return (
        f"{first[0].upper()}{first[1:]} and {second} {word}: {second} contributes "
        f"{signed(effect.alone.value)} without {first} and {signed(effect.beside.value)} with it "
        f"(a difference of {signed(contrast.value)} {interval(contrast.bounds)}{p})."
    )


# ------------------------------------------------------------------------------------ the ladder


def ladder_findings(found: Ladder) -> list[str]:
    """How the metric and the gaps change with size, and whether ranks hold."""
    if not found.has_lines:
        names = [rung.name for rung in found.rungs]
        return [f"The ladder has results of {listed(names)}; a line needs three sizes."]
    return [_sizes_sentence(found), _gaps_sentence(found), _ranks_sentence(found)]


def ladder_limits(found: Ladder) -> str:
    """The limits of the lines of a ladder."""
    text = (
        f"The lines describe these {len(found.rungs)} sizes. {_points_of(found)} do not show whether a line "
        "bends, so nothing here says what happens at other sizes. The exponent is that of a power law "
        "without a floor, which no loss follows far."
    )
    tokens = {rung.tokens for rung in found.rungs}
    if len(tokens) == 1:
        shares = [f"{rung.tokens / rung.parameters:.2g}" for rung in found.rungs]
        text += (
            f" All runs have {many(tokens.pop())} training tokens, so larger models see fewer tokens per "
            f"parameter ({' → '.join(shares)}), and the effect of size cannot be separated from that."
        )
    return text + (
        " Intervals are over seeds; they ignore that a learning rate may suit one size better. In a "
        "simulation with three sizes and three seeds, an error that all runs of a cell share at one size, as "
        "large as the spread over seeds, leaves the true slope inside its 95 % interval in 81 % of cases."
    )


def _points_of(found: Ladder) -> str:
    return {3: "Three points", 4: "Four points"}.get(len(found.rungs), "So few points")


def _sizes_sentence(found: Ladder) -> str:
    """Sizes, tokens, and the exponents of the baseline, the steepest and the flattest cell."""
    sizes = listed([many(rung.parameters) for rung in found.rungs])
    tokens = sorted({rung.tokens for rung in found.rungs})
    trained = f"{many(tokens[0])} tokens each" if len(tokens) == 1 else f"{many(tokens[0])} tokens or more"
    text = f"Over {sizes} parameters ({trained})"
    lines = {cell: line for cell, line in found.powers.items() if line is not None}
    ranked = sorted(lines, key=lambda cell: lines[cell].slope.value)
    shown = [name for name in dict.fromkeys([found.baseline, *ranked[:1], *ranked[-1:]]) if name in lines]
    parts = [f"{_from_to(found, name)} for {name} ({_exponent(lines[name])})" for name in shown]
    return f"{text}, {found.first.metric} goes {listed(parts)}." if parts else f"{text}."


def _from_to(found: Ladder, cell: str) -> str:
    spreads = [each.spread for each in found.runs(cell)]
    return f"from {plain(spreads[0] and spreads[0].mean)} to {plain(spreads[-1] and spreads[-1].mean)}"


def _exponent(line: Line) -> str:
    return f"exponent {plain(line.slope.value)} {interval(line.slope.bounds)}".rstrip()


def _gaps_sentence(found: Ladder) -> str:
    groups: dict[str, list[Trend]] = {}
    for trend in found.trends.values():
        groups.setdefault(trend.direction, []).append(trend)
    head = f"Per doubling of the parameters, the gap to {found.baseline}"
    if not groups.keys() - {OPEN}:
        return f"{head} changes for no cell in a way that is decided ({_slopes(groups.get(OPEN, []))})."
    parts = [
        f"{direction.removeprefix('the gap ')} for {_slopes(groups[direction], with_p=True)}"
        for direction in (GROWS, SHRINKS, TURNS)
        if direction in groups
    ]
    if OPEN in groups:
        parts.append(f"is undecided for {_slopes(groups[OPEN])}")
    return f"{head} {'; it '.join(parts)}."


def _slopes(trends: list[Trend], *, with_p: bool = False) -> str:
    texts = []
    for trend in trends:
        slope = trend.line.slope if trend.line else None
        if slope is None:
            texts.append(f"{trend.cell} (no line)")
            continue
        p = f", {chance(trend.p)}" if with_p and trend.p is not None else ""
        if with_p and trend.by_seed and trend.by_seed.bounds:
            p += f"; from one slope per seed {interval(trend.by_seed.bounds)}"
        texts.append(f"{trend.cell} ({signed(slope.value)} {interval(slope.bounds)}".rstrip() + f"{p})")
    return listed(texts)


def _ranks_sentence(found: Ladder) -> str:
    """Kendall's tau from size to size, and the pairs that change places."""
    taus = [
        f"{plain(step.tau, 2)} from {step.smaller} to {step.larger} ({step.sure} of "
        f"{counted(step.pairs, 'pair')} in the same order, decided at both)"
        for step in found.steps
    ]
    text = f"Ranks: Kendall's tau is {listed(taus)}."
    decided = [pair for step in found.steps for pair in _swapped(step, decided=True)]
    undecided = [pair for step in found.steps for pair in _swapped(step, decided=False)]
    if decided:
        text += f" Decided changes of place: {listed(decided)}."
    if undecided:
        lead = "Other" if decided else "No change of place is decided;"
        text += f" {lead} pairs whose means change places: {listed(undecided)}."
    return text + (" No two cells change places." if not decided and not undecided else "")


def _swapped(step: RankStep, *, decided: bool) -> list[str]:
    return [
        f"{swap.after} passes {swap.before} ({step.smaller} to {step.larger})"
        for swap in step.swaps
        if swap.is_decided == decided
    ]


# ----------------------------------------------------------------------------------- the effects


def effect_sentence(factorial: Factorial, effect: Effect) -> str:
    """One sentence that the numbers support."""
    numbers = _test(effect, factorial.noise_df)
    if factorial.diverged:
        return (
            f"{effect.name}: {numbers} among the finished runs; not decided, as "
            f"{listed_cells(factorial.diverged)} diverged."
        )
    if effect.p is None:
        return f"{effect.name}: one seed only, so there is no noise to compare it with."
    if not effect.supported:
        return f"{effect.name}: undecided ({numbers})."
    if effect.term[0] not in factorial.axes:
        return f"Three or more parts act together in ways that pairs do not explain ({numbers})."
    return (_main if len(effect.term) == 1 else _interaction)(factorial, effect, numbers)


def _test(effect: Effect, noise_df: int) -> str:
    if effect.f is None or effect.p is None:
        return f"{share(effect.share)} of the variance"
    test = f"F({effect.df}, {noise_df}) = {ratio(effect.f)}, {chance(effect.p)}"
    if effect.p_by_seed is None:
        test += "; no test seed by seed, as fewer than two seeds have every cell"
    else:
        test += f"; seed by seed {chance(effect.p_by_seed)}"
    return f"{share(effect.share)} of the variance, {test}"


def _main(factorial: Factorial, effect: Effect, numbers: str) -> str:
    (axis,) = effect.term
    outcome = factorial.outcome
    means = factorial.marginal(axis)
    ranked = sorted(means, key=lambda level: means[level], reverse=outcome.higher_is_better)
    best, worst = ranked[0], ranked[-1]
    level = 1 - (1 - CONFIDENCE) / math.comb(len(ranked), 2)
    apart = {name: factorial.seed_contrast({axis: (best, name)}) for name in ranked[1:]}
    behind = {
        name
        for name, difference in apart.items()
        if difference is not None
        and (bounds := outcome.worsening(difference).interval(level)) is not None
        and bounds[0] > 0
    }
    head = f"{axis} makes a difference ({numbers})"
    last = apart[worst]
    if last is None or worst not in behind:
        return f"{head}, though its best and its last level do not differ significantly."
    with_best = [name for name in apart if name not in behind]
    if not with_best:
        lead = f"{best} is best"
    elif len(with_best) == 1:
        lead = f"{listed_cells([best, *with_best])} lead, and which of them is better is undecided"
    else:
        lead = f"{best} leads, its distance to {listed_cells(with_best)} is undecided"
    unit = outcome.metric + (f" ({outcome.difference_unit})" if outcome.difference_unit else "")
    return (
        f"{head}: averaged over the other parts {lead}; {worst} is last, "
        f"{signed(last.value)} {interval(last.interval(level))} in {unit} against {best}."
    )


def _interaction(factorial: Factorial, effect: Effect, numbers: str) -> str:
    first, second = effect.term
    head = f"What {first} does depends on {second} ({numbers})"
    every = list(factorial.pairs_of(effect.term))
    level = 1 - (1 - CONFIDENCE) / len(every)
    found = []
    for pairs in every:
        contrast = factorial.seed_contrast(pairs)
        bounds = None if contrast is None else contrast.interval(level)
        if contrast is not None and bounds and (bounds[0] > 0 or bounds[1] < 0):
            found.append((contrast, bounds, pairs))
    if not found:
        return f"{head}, though no single pair of levels shows it significantly."
    contrast, bounds, pairs = max(found, key=lambda item: abs(item[0].value))
    row, column = pairs[first], pairs[second]
    steps = [factorial.seed_contrast({first: row}, at={second: name}) for name in column]
    before, after = (signed(step.value) if step else "an unknown amount" for step in steps)
    return (
        f"{head}: from {row[0]} to {row[1]}, {factorial.outcome.metric} changes by {before} under "
        f"{column[0]} but by {after} under {column[1]} (a difference of {signed(contrast.value)} "
        f"{interval(bounds)})."
    )
