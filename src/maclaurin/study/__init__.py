"""A study: a question, a grid over parts of attention, seeds, and the claims to hold against it.

Stating one needs no torch; running one does (maclaurin.study.runner).
"""

from maclaurin.study.claim import Behind, Claim, Ordered, Tied
from maclaurin.study.design import Cell, Experiment, Study, cells_of, grid

__all__ = ["Behind", "Cell", "Claim", "Experiment", "Ordered", "Study", "Tied", "cells_of", "grid"]
