"""How the cells of an experiment were trained: settings, rules of the comparison, the search for rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from maclaurin.report.formatting import (
    NOTHING,
    Column,
    Entry,
    Table,
    counted,
    in_one_line,
    listed,
    many,
    plain,
    share,
)
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
from maclaurin.report.outcome import Outcome
from maclaurin.study.run_record import CellTuning
from maclaurin.wording import duration

#: data whose rows are generated: they have no documents to hold out
_GENERATED = ("mqar", "induction", "copy", "state", "parity")


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


_FACTOR_COLUMNS = (
    Column("output factor", "number", "rate of the output projections of attention over the learning rate"),
    Column("gain over factor 1", "number", "over the best single rate for all weights, on the tuning seeds"),
)


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
        values = trial_means(cell, sign)
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


def _factor_entries(cell: CellTuning, sign: float) -> tuple[Entry, Entry]:
    """The factor of a cell, and what it gains over one rate for all weights."""
    if cell.factor is None:
        return Entry(NOTHING), Entry(NOTHING)
    means = setting_means(cell, sign)
    own = means.get((cell.rate, cell.factor))
    alike = min((sign * value for (_, factor), value in means.items() if factor == 1.0), default=math.inf)
    gain = None if own is None or not math.isfinite(alike) else alike - sign * own
    return Entry(f"{cell.factor:g}", cell.factor), Entry(plain(gain), gain)


def _tried(cell: CellTuning) -> str:
    if cell.factor is None:
        return counted(len({trial.rate for trial in cell.trials}), "rate")
    return counted(len({(trial.rate, trial.factor) for trial in cell.trials}), "setting")


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
