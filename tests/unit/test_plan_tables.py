"""Tables of plans that `maclaurin convert` prints."""

from maclaurin.cli.convert import _table_of_plans, _wide_console


def test_keys_of_heads_are_readable_in_a_file(capsys):
    """rich assumes 80 columns without a terminal, which left one character for them."""
    table = _table_of_plans("plans", "")
    name = "13 exact; others 132–2,052 by damage"
    table.add_row("original", "28.3", "27.13", "0.69", "+1.50", "-0.000 ± 0.000", "64", name)
    _wide_console().print(table)
    assert name in capsys.readouterr().out
