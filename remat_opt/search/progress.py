"""Progress of a long search, reported to a callback."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

_listener: contextvars.ContextVar[Callable[[float], None] | None] = contextvars.ContextVar("watcher", default=None)


@contextlib.contextmanager
def reporting_to(listener: Callable[[float], None]) -> Iterator[None]:
    """Report the finished share of a search to `listener`, in this thread and context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(share: float) -> None:
    """Report that a share (0 to 1) of the search is done, if there is a watcher."""
    listener = _listener.get()
    if listener is not None:
        listener(share)


@contextlib.contextmanager
def part(number: int, count: int) -> Iterator[None]:
    """A context for search `number` (from 0) of `count` searches of about the same length."""
    listener = _listener.get()
    if listener is None:
        yield
        return
    with reporting_to(lambda share: listener((number + share) / count)):
        yield
