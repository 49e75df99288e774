"""Evaluate models: our own tasks, which need no network, and those of lm-evaluation-harness.

Your own task is a subclass of TextTask with the decorator `register`.
"""

from maclaurin.evaluation.eval_task import Item, Query, TextTask, register
from maclaurin.evaluation.needles import Recall, VariableTracking
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.text_tasks import Induction

__all__ = ["Induction", "Item", "Prose", "Query", "Recall", "TextTask", "VariableTracking", "register"]
