"""A command in the test's own process: as quick as a function call, with the same output and exit code."""

import sys
from dataclasses import dataclass

from maclaurin.cli.main import main


@dataclass
class Said:
    """What a command printed."""

    stdout: str
    stderr: str


def maclaurin(monkeypatch, capfd, *arguments, expect=0):
    """Run `maclaurin ARGUMENTS`; a traceback is a failure of the test."""
    monkeypatch.setattr(sys, "argv", ["maclaurin", *map(str, arguments)])
    capfd.readouterr()
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    said = Said(*capfd.readouterr())
    assert code == expect, said.stdout + said.stderr
    return said
