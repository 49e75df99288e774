"""Progress: nothing for what is quick, lines in logs, a bar on a terminal."""

import sys

import pytest

from maclaurin import progress_bar
from maclaurin.progress_bar import Bar, Lines, Silent, report_progress


def test_quick_work_prints_nothing(capsys):
    with report_progress("counting", True) as report:
        report(0.5, "5 of 10")
    assert capsys.readouterr() == ("", "")


def test_lines_have_the_share_and_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.0)
    with report_progress("counting", True) as report:
        report(0.5, "5 of 10")
        report(0.6, "6 of 10")  # not due yet
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["counting · 5 of 10 · 50%, 0 s left", "counting · 0 s"]


def test_an_unknown_end_is_not_guessed(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.0)
    Lines("counting")(None, "5 so far")
    assert capsys.readouterr().err == "counting · 5 so far\n"


@pytest.mark.parametrize(
    ("terminal", "enabled", "kind"), [(True, True, Bar), (False, True, Lines), (True, False, Silent)]
)
def test_the_report_fits_where_it_goes(monkeypatch, terminal, enabled, kind):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    with report_progress("counting", enabled) as report:
        assert type(report) is kind


def test_the_bar_shows_title_note_and_share(capsys, monkeypatch):
    monkeypatch.setattr(progress_bar, "QUIET_SECONDS", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    bar = Bar("counting [1]")
    bar(0.25, "5 of 20")
    bar(None, "6 of ?")
    bar.close()
    shown = capsys.readouterr().err
    assert "counting [1]" in shown
    assert "6 of ?" in shown
