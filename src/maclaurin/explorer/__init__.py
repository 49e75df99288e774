"""The explorer: one self-contained page that takes softmax apart, with real scores.

capture.py        scores and values of contrasting heads of a model, as data for the page
explorer_page.py  builds the page from modules, styles, captured scores, the catalogue and the laws
web/              its sources: plain ES modules, a style sheet and a skeleton
"""
