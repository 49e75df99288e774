"""What a program must define."""

import pytest

from maclaurin.programs.program import Program


def test_run_and_prepared_follow_from_each_other():
    class Runs(Program):
        def run(self, call):
            return f"ran {call}", None

        cannot = cost = lambda self, call: None

    class Prepares(Program):
        def prepared(self, call):
            return lambda other: (f"{call} ran {other}", None)

        cannot = cost = lambda self, call: None

    assert Runs().prepared("a")("b") == ("ran b", None)
    assert Prepares().run("a") == ("a ran a", None)

    class Inherits(Runs):
        pass

    assert Inherits().run("c") == ("ran c", None)


def test_a_program_that_computes_nothing_cannot_be_defined():
    with pytest.raises(TypeError, match="Nothing must define `run` or `prepared`"):

        class Nothing(Program):
            cannot = cost = lambda self, call: None
