"""What parts contribute, and how differences change with size, as tables."""

from __future__ import annotations

from maclaurin.report.anova import Factorial
from maclaurin.report.cell_tables import decimals_of, difference_entry, spread_entry
from maclaurin.report.contributions import Contributions
from maclaurin.report.formatting import (
    NOTHING,
    Column,
    Entry,
    Table,
    Tone,
    chance,
    counted,
    many,
    ratio,
    share,
    signed,
)
from maclaurin.report.ladder import UNDECIDED, Ladder


def effects_table(factorial: Factorial) -> Table:
    """Main effects and interactions, then seed and noise."""
    columns = (
        Column("effect"),
        Column("share of variance", "number"),
        Column("df", "number"),
        Column("F", "number", "against noise pooled over all cells"),
        Column("p of F", "number", "corrected for the number of effects (Holm)"),
        Column("p seed by seed", "number", "of its contrasts, one value per seed (Bonferroni, then Holm)"),
        Column("verdict", "text", "decided if both p are below 0.05"),
    )
    rows = []
    for effect in (*factorial.effects, *factorial.left_over):
        left = effect in factorial.left_over
        verdict = "" if left else "decided" if effect.supported else "undecided"
        tone: Tone = "muted" if left else "good" if effect.supported else "unsure"
        rows.append(
            (
                Entry(effect.name, effect.name),
                Entry(share(effect.share), effect.share),
                Entry(str(effect.df), effect.df),
                Entry(ratio(effect.f), effect.f),
                _p_entry(effect.p),
                _p_entry(effect.p_by_seed),
                Entry(verdict, verdict, tone=tone),
            )
        )
    return Table("effects", columns, tuple(rows))


def contributions_table(found: Contributions) -> Table:
    """The contribution of each part of a waterfall, and of all parts together."""
    decimals, gap = decimals_of(found.outcome), found.gap
    unit = f", {found.outcome.difference_unit}" if found.outcome.difference_unit else ""
    columns = (
        Column("part"),
        Column(
            f"contribution{unit}",
            "number",
            "mean over the orders of adding the parts, 95 % interval over seeds",
        ),
        Column("share of the gap", "number"),
        Column("p (Holm)", "number", f"corrected for {counted(found.tested_parts, 'contribution')}"),
    )
    rows = [
        (
            Entry(part.switch, part.switch),
            difference_entry(part.size, decimals),
            _share_entry(part.size.value, gap.value),
            _p_entry(part.p),
        )
        for part in found.parts
    ]
    rows.append(
        (Entry("all of them"), difference_entry(gap, decimals), _share_entry(1.0, 1.0), Entry(NOTHING))
    )
    return Table("contributions", columns, tuple(rows))


def pairs_table(found: Contributions) -> Table:
    """The contribution of a part without another and with it, the largest difference first."""
    decimals = decimals_of(found.outcome)
    columns = (
        Column("part"),
        Column("beside"),
        Column("contributes without it", "number"),
        Column("with it", "number"),
        Column("difference", "number", "95 % interval over seeds"),
        Column("p (Holm)", "number", f"corrected for {counted(found.tested_pairs, 'pair')}"),
    )
    rows = tuple(
        (
            Entry(effect.pair.second, effect.pair.second),
            Entry(effect.pair.first, effect.pair.first),
            Entry(signed(effect.alone.value, decimals), effect.alone.value),
            Entry(signed(effect.beside.value, decimals), effect.beside.value),
            difference_entry(effect.interaction_contrast, decimals),
            _p_entry(effect.p),
        )
        for effect in found.interactions
    )
    return Table("pairs of parts", columns, rows)


def ladder_slopes_table(found: Ladder) -> Table:
    """How the difference to the baseline changes with the size."""
    columns = (
        Column("cell"),
        Column("per doubling of the parameters", "number", "slope of the line, 95 % interval (HC3)"),
        Column("one slope per seed", "number", "their mean, 95 % interval over the seeds"),
        Column("p (Holm)", "number", "of the slope of the line"),
        Column("verdict"),
    )
    rows = tuple(
        (
            Entry(cell, cell),
            difference_entry(trend.line.slope if trend.line else None, 3),
            difference_entry(trend.by_seed, 3),
            _p_entry(trend.p),
            Entry(trend.direction, trend.direction, tone="unsure" if trend.direction == UNDECIDED else ""),
        )
        for cell, trend in found.trends.items()
    )
    return Table("slopes", columns, rows)


def ladder_gaps_table(found: Ladder) -> Table:
    """The difference to the baseline at each size."""
    columns = (
        Column("cell"),
        *(
            Column(f"at {rung.name} ({many(rung.parameters)})", "number", "seed by seed, 95 % interval")
            for rung in found.rungs
        ),
    )
    rows = tuple(
        (Entry(cell, cell), *(difference_entry(rung.outcome.differences[cell], 3) for rung in found.rungs))
        for cell in found.others
    )
    return Table("gaps by size", columns, rows)


def ladder_values_table(found: Ladder) -> Table:
    """The metric of each cell at each size, and the exponent of its fit."""
    metric = found.first.metric
    columns = (
        Column("cell"),
        *(
            Column(
                f"{metric} at {rung.name} ({many(rung.parameters)})",
                "number",
                f"{rung.tokens / rung.parameters:.2g} tokens per parameter; mean ± standard deviation",
            )
            for rung in found.rungs
        ),
        Column("exponent", "number", f"slope of ln {metric} against ln parameters, 95 % interval (HC3)"),
    )
    rows = tuple(
        (
            Entry(cell, cell),
            *(spread_entry(each, 3) for each in found.runs(cell)),
            difference_entry(line.slope if line else None, 4),
        )
        for cell, line in found.powers.items()
    )
    return Table("values by size", columns, rows)


def ladder_tokens_table(found: Ladder) -> Table | None:
    """The difference to the baseline during training, size by size; None if evaluations do not match."""
    during = {(cell, rung): found.during(rung, cell) for cell in found.others for rung in found.rungs}
    tokens = sorted({at for gaps in during.values() for at in gaps})
    if len(tokens) < 2 or any(set(gaps) != set(tokens) for gaps in during.values()):
        return None
    columns = (
        Column("cell"),
        Column("size"),
        *(Column(f"minus {found.baseline} at {many(at)} tokens", "number") for at in tokens),
    )
    rows = tuple(
        (
            Entry(cell, cell),
            Entry(rung.name, rung.parameters),
            *(difference_entry(gaps[at], 3) for at in tokens),
        )
        for (cell, rung), gaps in during.items()
    )
    return Table("gaps during training", columns, rows)


def _share_entry(value: float, whole: float) -> Entry:
    return Entry(f"{100 * value / whole:.0f} %".replace("-", "−"), value / whole) if whole else Entry(NOTHING)


def _p_entry(p: float | None) -> Entry:
    return Entry(NOTHING if p is None else chance(p).removeprefix("p ").removeprefix("= "), p)
