"""Rewrites of a program that need less memory, with the same results.

`captured.py` traces a function and applies `handed_back.py` (a scan that returns its weights), `one_hot.py` (cross
entropy without a scatter) and `masks.py` (a rectifier's mask from its output). `graph/build.py` applies `pooling.py`
(max-pooling's backward pass without a scatter), `splits.py` (a slice for each piece) and `random_masks.py` (which masks
are drawn from random bits). `slices.py` marks slices that may be read again, `loop_bodies.py` replaces the bodies of
scans before differentiation (for `checkpoint`). `split/` splits the batch, which the planner asks for. Loops have a
room of their own.
"""
