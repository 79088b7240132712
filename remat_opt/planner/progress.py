"""Progress of a search on a terminal, when it takes long; silence otherwise."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

AFTER_SECONDS = 2.0


class SearchProgress:
    """Call it with the share that is done; a bar appears on a terminal after `AFTER_SECONDS` and goes at the end.

    Args:
        stream: where to show it; default standard error. Anything but a terminal stays silent.
        after: seconds before the bar appears.
        what: is being done, in a word or two.

    With `rich` installed it is rich's bar, else a line that is written over.
    """

    def __init__(self, stream: TextIO | None = None, after: float = AFTER_SECONDS, what: str = "searching"):
        self.what = what
        self.stream = sys.stderr if stream is None else stream
        self.started, self.after = time.monotonic(), after
        self.bar: Any = None
        self.shown = False

    def __enter__(self) -> SearchProgress:
        return self

    def __call__(self, share: float) -> None:
        """Show that `share` (0 to 1) of the search is done."""
        if time.monotonic() - self.started < self.after or not self.stream.isatty():
            return
        if not self.shown:
            self.shown, self.bar = True, _rich_bar(self.stream, self.what)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=share)
        else:
            self.stream.write(f"\rremat_opt: {self.what}, {share:.0%} done ")
            self.stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.shown:
            self.stream.write("\r" + " " * 40 + "\r")
            self.stream.flush()


def _rich_bar(stream: TextIO, what: str) -> Any:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    bar = Progress(console=Console(file=stream), transient=True)
    bar.add_task(f"remat_opt: {what}", total=1.0)
    bar.start()
    return bar
