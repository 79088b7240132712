"""Progress of a long search, reported to a callback."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_watcher: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched_by(watcher: Callable[[float], None]) -> Iterator[None]:
    """Report the finished share of a search to `watcher`, in this thread and context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def done(share: float) -> None:
    """Report that a share (0 to 1) of the search is done, if there is a watcher."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(share)


@contextlib.contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """A context for search `number` (from 0) of `count` searches of about the same length."""
    watcher = _watcher.get()
    if watcher is None:
        yield
        return
    with watched_by(lambda share: watcher((number + share) / count)):
        yield
