"""How well a model answers: tasks of our own, which need no network, and lm-evaluation-harness.

A task of your own is a subclass of TextTask with the decorator `register`.
"""

from maclaurin.evaluation.eval_task import Item, Query, TextTask, register
from maclaurin.evaluation.needles import Recall
from maclaurin.evaluation.prose import Prose
from maclaurin.evaluation.word_tasks import VariableTracking

__all__ = ["Item", "Prose", "Query", "Recall", "TextTask", "VariableTracking", "register"]
