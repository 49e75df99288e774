"""What was checked: the claims of a study, and the forms of its specs."""

from __future__ import annotations

from maclaurin.report.formatting import NOTHING, Column, Entry, Table, Tone, plain, power
from maclaurin.report.verdict import Judgement
from maclaurin.study.claims import Alike, Published
from maclaurin.study.run_record import FormsRecord

TONES: dict[str, Tone] = {"agrees": "good", "disagrees": "bad", "undecided": "unsure", "not run": "muted"}


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
