"""How a long search tells how far it is, to whoever watches it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_watcher: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched_by(watcher: Callable[[float], None]) -> Iterator[None]:
    """Let `watcher` be told, in this thread and context, what share of a search is done."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def done(share: float) -> None:
    """Tell the watcher, if there is one, that a share (0 to 1) of the search is done."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(share)


@contextlib.contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """What is done inside is one of `count` searches of about the same length, the one with this number (from 0)."""
    watcher = _watcher.get()
    if watcher is None:
        yield
        return
    with watched_by(lambda share: watcher((number + share) / count)):
        yield
