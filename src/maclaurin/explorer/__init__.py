"""The explorer: one self-contained page on which softmax is taken apart, and real scores to do it with.

capture.py        scores and values of contrasting heads of a model, as data for the page
explorer_page.py  the page in one piece: modules, styles, captured scores, the catalogue, the laws
web/              its sources: plain ES modules, a style sheet and a skeleton
"""
