"""The tables of a study, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from maclaurin.report.anova import Factorial
from maclaurin.report.contributions import Contributions
from maclaurin.report.formatting import (
    NOTHING,
    Column,
    Entry,
    Table,
    Tone,
    chance,
    counted,
    in_one_line,
    interval,
    listed,
    many,
    plain,
    power,
    ratio,
    share,
    signed,
    size,
)
from maclaurin.report.ladder import UNDECIDED, Ladder
from maclaurin.report.learning_rates import (
    GOOD,
    Parabola,
    best_rate,
    has_factors,
    parabola_at,
    setting_means,
    trial_means,
    tuned_steps,
    tuning_sign,
)
from maclaurin.report.outcome import CellOutcome, Outcome
from maclaurin.report.statistics import Difference
from maclaurin.report.verdict import Judgement
from maclaurin.study.claims import Alike, Published
from maclaurin.study.run_record import CellTuning, FormsRecord, RunRecord, StudyRecord
from maclaurin.wording import duration

#: data whose rows are generated: they have no documents to hold out
_GENERATED = ("mqar", "induction", "copy", "state", "parity")
TONES: dict[str, Tone] = {"agrees": "good", "disagrees": "bad", "undecided": "unsure", "not run": "muted"}


# ------------------------------------------------------------------------------------- the parts


def parts_table(outcome: Outcome) -> Table:
    """Mean, difference to the baseline and standing of every cell, best first."""
    unit = f" in {outcome.difference_unit}" if outcome.difference_unit else ""
    columns = (
        Column("cell", "named"),
        Column(outcome.metric, "number", "mean ± standard deviation over the seeds"),
        Column(
            f"minus {outcome.experiment.baseline}{unit}", "number", "seed by seed, with its 95 % interval"
        ),
        Column("against it"),
        Column("seeds", "number"),
    )
    rows = tuple(_parts_row(outcome, outcome.cells[name]) for name in outcome.best_first())
    return Table(f"{outcome.metric} by cell", columns, rows)


def _parts_row(outcome: Outcome, cell: CellOutcome) -> tuple[Entry, ...]:
    decimals = decimals_of(outcome)
    is_baseline = cell.name == outcome.experiment.baseline
    return (
        Entry(cell.name, cell.name, ", ".join(cell.attention)),
        spread_entry(cell, decimals),
        Entry(NOTHING) if is_baseline else difference_entry(outcome.differences[cell.name], decimals),
        standing_entry(outcome, cell),
        Entry(str(len(cell.values)), len(cell.values)),
    )


def decimals_of(outcome: Outcome) -> int:
    """Digits after the point that are above the noise."""
    known = [
        c.spread.deviation for c in outcome.cells.values() if c.spread and c.spread.deviation is not None
    ]
    means = [abs(c.spread.mean) for c in outcome.cells.values() if c.spread]
    if means and min(means) >= 1000:
        return 0
    return 4 if known and max(known) < 5e-4 else 3


def spread_entry(cell: CellOutcome, decimals: int) -> Entry:
    """2.521 ± 0.011."""
    if cell.spread is None:
        return Entry(NOTHING)
    deviation = cell.spread.deviation
    sd = "" if deviation is None else f"± {plain(deviation, decimals)}"
    return Entry(plain(cell.spread.mean, decimals), cell.spread.mean, sd)


def difference_entry(difference: Difference | None, decimals: int) -> Entry:
    """+0.104 [0.081, 0.127]."""
    if difference is None:
        return Entry(NOTHING)
    if math.isinf(difference.value):
        return Entry("diverged", difference.value, tone="bad")
    return Entry(signed(difference.value, decimals), difference.value, interval(difference.bounds, decimals))


def standing_entry(outcome: Outcome, cell: CellOutcome) -> Entry:
    """The standing of a cell, and the runs that did not finish."""
    standing = outcome.standing(cell.name)
    tones: dict[str, Tone] = {"behind": "bad", "ahead": "good", "undecided": "unsure"}
    words = {"one seed": "one seed: no conclusion", "not run": "no finished run"}
    planned = len(outcome.experiment.seeds)
    asides = []
    if cell.diverged:
        asides.append(f"diverged in {len(cell.diverged)} of {planned}")
    if cell.crashed:
        asides.append(f"crashed in {len(cell.crashed)} of {planned}")
    text = words.get(standing, standing)
    return Entry(text, text, f"({'; '.join(asides)})" if asides else "", tones.get(standing, "muted"))


# ------------------------------------------------------------------------------ how it was trained

#: config key → its name in the table; other keys keep their own name
_NAMES = {
    "lr": "learning rate", "output_lr": "factor of the output projection", "batch_size": "rows per step",
    "length": "tokens per row",
}  # fmt: skip
#: keys that identify the run, or say where and how it was computed
_HIDDEN = ("attention", "seed", "device", "keep", "trackers", "checkpoint_every", "log_every", "eval_every")
#: keys that are shown even if they have their default
_ALWAYS = (
    "size", "data", "tokenizer", "length", "steps", "batch_size", "lr", "schedule", "warmup", "final_lr",
    "weight_decay", "beta1", "beta2", "clip", "precision", "initialization",
)  # fmt: skip


def common_settings(outcome: Outcome) -> list[tuple[str, str]]:
    """What all cells were trained with: (name, value)."""
    configs = [cell.first.run.config for cell in outcome.cells.values() if cell.first]
    if not configs:
        return []
    differing = _differing(configs)
    names = [name for name in _ALWAYS if name in configs[0] and name not in differing]
    found = [(_NAMES.get(name, name.replace("_", " ")), _setting(configs[0][name])) for name in names]
    tokens = {cell.first.run.tokens for cell in outcome.cells.values() if cell.first}
    if len(tokens) == 1:
        found.append(("training tokens", f"{tokens.pop():,}"))
    prints = {cell.first.run.data[:12] for cell in outcome.cells.values() if cell.first}
    found.append(("data fingerprint", ", ".join(sorted(prints))))
    return [*found, *_held_out(outcome)]


def rules_of_comparison(outcome: Outcome) -> list[str]:
    """What was made equal between the cells, and by which rule."""
    records = [record for cell in outcome.cells.values() for record in cell.records.values()]
    equal, baseline = outcome.experiment.equal, outcome.experiment.baseline
    found = []
    if any(record.run.config.get("equal_start") for record in records):
        found.append(
            "Equal start: before training, the output projection of each layer is multiplied by one number, "
            "so that its attention adds as much to the residual stream (rms) as softmax does with the same "
            "settings and seed. The number is measured on 4 rows of training text, layer by layer."
        )
    if equal == "flops":
        found.append(f"Equal compute: the steps of each cell are those that cost the FLOPs of {baseline}.")
    if equal == "state":
        found.append(
            f"Equal memory: after a row of the trained length, every cell keeps as many bytes as {baseline} "
            "(within 2 %), states and the keys and values of windows counted in fp32."
        )
    return found


def _held_out(outcome: Outcome) -> list[tuple[str, str]]:
    """The size of the test data; a task such as recall has no documents."""
    records = [record for cell in outcome.cells.values() for record in cell.records.values()]
    first = next(iter(records), None)
    fraction = None if first is None else first.run.config.get("test_fraction")
    if first is None or fraction is None or first.run.config["data"].partition(":")[0] in _GENERATED:
        return []
    share = f"{fraction:g} of the documents"
    scored = next((n for record in records if (n := record.value("scored_tokens")) is not None), None)
    words = [share] if scored is None else [share, f"{scored:,.0f} tokens scored"]
    held_out = first.provenance.get("held_out")
    if held_out is None:
        words.append("the number of documents was not recorded")
    else:
        test = held_out["test"]
        words.insert(1, f"{test['documents']:,} documents, the largest {test['largest']:.0%} of them")
    return [("test data", "; ".join(words))]


def settings_table(outcome: Outcome) -> Table:
    """What differs between the cells, with parameters and tokens of each."""
    cells = [cell for cell in outcome.cells.values() if cell.first]
    configs = [cell.first.run.config for cell in cells if cell.first]
    differing = _differing(configs)
    columns = (
        Column("cell"),
        Column("attention", "code"),
        *(Column(_NAMES.get(name, name.replace("_", " ")), "number") for name in differing),
        Column("parameters", "number"),
        Column("training tokens", "number"),
        Column("training FLOPs", "number", "forward and backward, all steps"),
    )
    rows = []
    for cell, config in zip(cells, configs, strict=True):
        first = cell.first
        tokens = first.run.tokens if first else 0
        flops, parameters = cell.average("training_flops"), cell.average("parameters")
        rows.append(
            (
                Entry(cell.name, cell.name),
                Entry(", ".join(cell.attention)),
                *(Entry(_setting(config.get(name)), _sortable(config.get(name))) for name in differing),
                Entry(many(parameters), parameters),
                Entry(many(tokens), tokens),
                Entry(NOTHING if flops is None else f"{flops:.2e}", flops),
            )
        )
    return Table("settings by cell", columns, tuple(rows))


def _differing(configs: Sequence[Any]) -> list[str]:
    names = dict.fromkeys(name for config in configs for name in config)
    return [
        name
        for name in names
        if name not in _HIDDEN and len({_setting(config.get(name)) for config in configs}) > 1
    ]


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else in_one_line(value)


def _sortable(value: Any) -> float | str | None:
    return value if isinstance(value, int | float | str) else None


def tuning_table(outcome: Outcome) -> Table | None:
    """The learning rate of each cell, how wide the good range is, and what was tried."""
    tuning = outcome.experiment.tuning
    if tuning is None:
        return None
    sign, both = tuning_sign(tuning), has_factors(tuning)
    columns = (
        Column("cell"),
        Column("learning rate", "number"),
        *(_FACTOR_COLUMNS if both else ()),
        Column(tuning.metric.replace("_", " "), "number", "at that rate, on the tuning seeds"),
        Column(
            "good range",
            "number",
            f"rates within {share(GOOD)} of the lowest point of a parabola through the best rate and its "
            "neighbours",
        ),
        Column("width", "number", "largest over smallest good rate"),
        Column("half a step off", "number", "what a rate √2 too large or small costs, by that parabola"),
        Column("tried", "number"),
        Column("time", "number", "all tuning runs of the cell"),
    )
    rows = []
    for name, cell in tuning.cells.items():
        values = trial_means(cell)
        at_rate, best = values.get(cell.rate), best_rate(cell, sign) if tuning.rule else cell.rate
        seconds = sum(trial.seconds or 0.0 for trial in cell.trials)
        rows.append(
            (
                Entry(name, name),
                Entry(f"{cell.rate:g}", cell.rate, "; ".join(_rate_notes(outcome, name, best))),
                *(_factor_entries(cell, sign) if both else ()),
                Entry(plain(at_rate), at_rate),
                *_parabola_entries(parabola_at(values, best, sign)),
                Entry(_tried(cell), len(cell.trials)),
                Entry(duration(seconds) if cell.trials else NOTHING, seconds),
            )
        )
    return Table("learning rates", columns, tuple(rows))


_FACTOR_COLUMNS = (
    Column("output factor", "number", "rate of the output projections of attention over the learning rate"),
    Column("gain over factor 1", "number", "over the best single rate for all weights, on the tuning seeds"),
)


def _factor_entries(cell: CellTuning, sign: float) -> tuple[Entry, Entry]:
    """The factor of a cell, and what it gains over one rate for all weights."""
    if cell.factor is None:
        return Entry(NOTHING), Entry(NOTHING)
    means = setting_means(cell)
    own = means.get((cell.rate, cell.factor))
    alike = min((sign * value for (_, factor), value in means.items() if factor == 1.0), default=math.inf)
    gain = None if own is None or not math.isfinite(alike) else alike - sign * own
    return Entry(f"{cell.factor:g}", cell.factor), Entry(plain(gain), gain)


def _tried(cell: CellTuning) -> str:
    if cell.factor is None:
        return counted(len({trial.rate for trial in cell.trials}), "rate")
    return counted(len(setting_means(cell)), "setting")


def _rate_notes(outcome: Outcome, name: str, best: float | None) -> list[str]:
    """What a reader should know about the rate of a cell."""
    cell = outcome.experiment.tuning.cells[name] if outcome.experiment.tuning else None
    if cell is None:
        return []
    notes = ["at the edge of what was tried"] if cell.on_edge else []
    if cell.diverged:
        notes.append(f"a final run diverged at {listed([f'{rate:g}' for rate in cell.diverged])}")
    if best is not None and best != cell.rate:
        notes.append(f"by the rule; {best:g} is better here")
    steps = tuned_steps(outcome, name)
    return notes + ([f"tuned at {steps:,} steps"] if steps is not None else [])


def _parabola_entries(found: Parabola | None) -> tuple[Entry, Entry, Entry]:
    """The good range, its width, and the cost of half a grid step."""
    if found is None:
        return Entry(NOTHING), Entry(NOTHING), Entry(NOTHING)
    low, high = found.good_range
    more = " or more" if found.is_wide else ""
    cost = found.half_step
    return (
        Entry(f"{low:.2g} – {high:.2g}{more}", low),
        Entry(f"× {high / low:.1f}{more}", high / low),
        Entry(plain(cost), cost),
    )


# -------------------------------------------------------------------------------------- the rest


def cost_table(outcome: Outcome) -> Table:
    """The cost of each cell: means over its finished runs."""
    columns = (
        Column("cell"),
        Column("tokens/s", "number", "of training alone on the machine, a few steps after the study"),
        Column("state", "number", "recurrent state of all layers in fp32"),
        Column(
            "kept", "number", "at the trained length, in fp32: the state, or keys and values where it grows"
        ),
        Column("parameters", "number"),
        Column("training FLOPs", "number"),
        Column("time", "number", "with evaluation, while other runs share the machine"),
        Column("peak GPU memory", "number"),
    )
    rows = []
    for cell in outcome.cells.values():
        if not cell.finished():
            continue
        speed = cell.tokens_per_second
        memory, seconds = cell.average("peak_gpu_bytes"), cell.average("seconds")
        parameters, flops = cell.average("parameters"), cell.average("training_flops")
        state, kept = cell.state_bytes, cell.memory_bytes
        rows.append(
            (
                Entry(cell.name, cell.name),
                Entry(many(speed), speed),
                Entry(
                    "grows" if state is None else size(state),
                    math.inf if state is None else state,
                ),
                Entry(NOTHING if kept is None else size(kept), kept),
                Entry(many(parameters), parameters),
                Entry(NOTHING if flops is None else f"{flops:.2e}", flops),
                Entry(NOTHING if seconds is None else duration(seconds), seconds),
                Entry(size(memory), memory),
            )
        )
    return Table("cost by cell", columns, tuple(rows))


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


def claims_table(judgements: list[Judgement]) -> Table:
    """Each claim with our numbers."""
    columns = (
        Column("claim", "prose"),
        Column("experiment"),
        Column("verdict"),
        Column("published", "prose"),
        Column("ours", "prose"),
    )
    rows = tuple(
        (
            Entry(j.claim.says, j.claim.says),
            Entry(j.claim.experiment),
            Entry(j.verdict, j.verdict, f"({'; '.join(j.notes)})" if j.notes else "", TONES[j.verdict]),
            Entry(published_text(j) or NOTHING),
            Entry(j.ours),
        )
        for j in judgements
    )
    return Table("claims", columns, rows)


def published_text(judgement: Judgement) -> str:
    """The published numbers, in our unit, with the source."""
    claim = judgement.claim
    parts = [_published(found) for found in claim.published]
    parts += [claim.note] if claim.note else []
    text = "; ".join(parts)
    return f"{text} ({claim.source})" if text and claim.source else text or claim.source


def _published(found: Published) -> str:
    ours = ", ".join(f"{cell} {plain(value)}" for cell, value in found.converted.items())
    theirs = ", ".join(f"{value:g}" for value in found.values.values())
    unit = {"loss": "nats per token", "accuracy": "accuracy"}[found.metric]
    same = found.unit in ("nats", "accuracy")
    return f"{found.where}: {ours} {unit}" + ("" if same else f", published as {found.unit} {theirs}")


def margin_text(judgement: Judgement) -> str:
    """± 0.02: why."""
    claim = judgement.claim
    return f"± {claim.within:g}: {claim.because}" if isinstance(claim, Alike) else ""


def forms_table(forms: FormsRecord) -> Table:
    """The largest error of each form, and the spec it belongs to."""
    columns = (
        Column("form"),
        Column("largest error", "number"),
        Column("at", "code"),
        Column("specs", "number"),
    )
    by_form: dict[str, list[tuple[float, str]]] = {}
    for row in forms.agreement:
        if row.get("error") is not None:
            by_form.setdefault(str(row["form"]), []).append((float(row["error"]), str(row["spec"])))
    rows = []
    for form, errors in by_form.items():
        error, spec = max(errors)
        rows.append(
            (Entry(form, form), Entry(power(error), error), Entry(spec), Entry(str(len(errors)), len(errors)))
        )
    return Table("agreement of the forms", columns, tuple(rows))


def agreement_table(forms: FormsRecord) -> Table:
    """Every comparison."""
    columns = (Column("spec", "code"), Column("form"), Column("error", "number"))
    rows = tuple(
        (
            Entry(str(row["spec"]), str(row["spec"])),
            Entry(str(row["form"]), str(row["form"])),
            Entry(power(row.get("error")), row.get("error")),
        )
        for row in forms.agreement
    )
    return Table("every comparison", columns, rows)


# ------------------------------------------------------------------------------------- provenance

FACTS = ("commit", "data", "machine", "versions", "date")


@final
@dataclass(frozen=True)
class Source:
    """A figure or table of the page, and the runs it was made from."""

    label: str
    title: str
    records: tuple[RunRecord, ...]


def figures_table(sources: Sequence[Source]) -> Table:
    """One line per figure and table of the page."""
    columns = (
        Column("what"),
        Column("title", "prose"),
        Column("runs", "number"),
        Column("seeds"),
        *(Column(name, "prose") for name in FACTS),
        Column("keys", "folded"),
    )
    rows = []
    for source in sources:
        records = source.records
        seeds = sorted({record.run.seed for record in records})
        keys = list(dict.fromkeys(record.key[:12] for record in records))
        rows.append(
            (
                Entry(source.label),
                Entry(source.title),
                Entry(str(len(records)), len(records)),
                Entry(", ".join(map(str, seeds)) or NOTHING),
                *(Entry(_all(name, records)) for name in FACTS),
                Entry(" ".join(keys), len(keys), f"{len(keys)} keys" if keys else ""),
            )
        )
    return Table("where each figure and table comes from", columns, tuple(rows))


def _all(name: str, records: tuple[RunRecord, ...]) -> str:
    found = sorted({in_one_line(record.provenance.get(name)) for record in records} - {NOTHING})
    if name == "date" and len(found) > 1:
        return f"{found[0]} – {found[-1]}"
    return "; ".join(found) or NOTHING


def runs_table(study: StudyRecord) -> Table:
    """Every run with its provenance."""
    columns = (
        Column("run", "code"),
        Column("experiment"),
        Column("cell"),
        Column("seed", "number"),
        Column("status"),
        Column("torch"),
        Column("numerics", "number"),
        *(Column(name, "prose") for name in FACTS),
    )
    rows = tuple(
        (
            Entry(record.key[:16], record.key),
            Entry(label.experiment, label.experiment),
            Entry(label.cell, label.cell),
            Entry(str(label.seed), label.seed),
            Entry(record.status, record.status),
            Entry(record.run.torch),
            Entry(str(record.run.numerics), record.run.numerics),
            *(Entry(in_one_line(record.provenance.get(name))) for name in FACTS),
        )
        for label, record in study.labelled()
    )
    return Table("every run", columns, rows)


def mixtures(outcome: Outcome) -> list[str]:
    """Sentences on finished runs of one experiment that differ in more than their cell and seed."""
    done = [record for record in outcome.records if record.status == "finished"]
    readers: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
        ("versions of torch or of our numerics", lambda r: f"{r.run.torch} {r.run.numerics}"),
        ("machines", lambda r: in_one_line(r.provenance.get("machine"))),
    )
    sentences = []
    for what, read in readers:
        found = {read(record) for record in done} - {NOTHING}
        if len(found) > 1:
            sentences.append(f"These runs come from {len(found)} {what}.")
    by_seed: dict[int, set[str]] = {}
    for record in done:
        by_seed.setdefault(record.run.seed, set()).add(record.run.data)
    if any(len(found) > 1 for found in by_seed.values()):
        names = sorted({in_one_line(record.provenance.get("data")) for record in done})
        sentences.append(f"Runs with the same seed did not all see the same version of {', '.join(names)}.")
    return sentences
