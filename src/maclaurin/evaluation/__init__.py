"""Downstream evaluation with lm-evaluation-harness, and a small set of tasks that needs no network.

Needs the extra `eval` (lm-eval).
"""
