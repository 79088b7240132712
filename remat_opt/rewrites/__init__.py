"""Rewrites of a program that need less memory, applied before planning.

Each file takes a `Program` and returns one with the same results: `pooling.py` (max-pooling's backward pass without a
scatter), `one_hot.py` (cross entropy without a scatter), `masks.py` (a rectifier's mask from its output),
`handed_back.py` (a scan that returns its weights), `splits.py` (a slice for each piece). `captured.py` traces a
function and applies those that depend on no search; `graph/build.py` applies the rest. Loops have a room of their own.
"""
