"""The same answer, fast: dispatch, plan, flash (exp family)."""
