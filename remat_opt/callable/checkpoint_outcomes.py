"""What `checkpoint` decided, by program."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from remat_opt.emit.checkpoint import Layout
from remat_opt.planner.plan import Plan
from remat_opt.planner.segmentation import Loops

_MOST_CACHED = 256  # programs


class Outcome(NamedTuple):
    """What to do with a program. It holds numbers only, nothing of a trace that may be over.

    Attributes:
        layout: the segments that are written, where there are several.
        is_one_region: without a layout: whether all of it stands under one `jax.checkpoint`, or runs as it is.
        loops: what becomes of the loops in it.
        steps: for each of them, how many steps are recomputed at a time; empty for one in all.
    """

    layout: Layout | None
    is_one_region: bool
    loops: Loops = Loops.AS_GIVEN
    steps: tuple[int, ...] = ()


ONE_REGION = Outcome(None, is_one_region=True)


class Outcomes:
    """What was decided, by program and settings; shared, since libraries wrap a function anew at each trace."""

    def __init__(self):
        self.found: collections.OrderedDict[Any, tuple[Outcome, Plan | None]] = collections.OrderedDict()
        self.lock = threading.RLock()

    def get(self, key: Any, decide: Callable[[], Outcome], plan: Plan | None) -> Outcome:
        """The outcome for a key. The entry holds the plan so that its `id`, which is part of the key, is not reused."""
        with self.lock:
            if key not in self.found:
                self.found[key] = decide(), plan
                if len(self.found) > _MOST_CACHED:
                    self.found.popitem(last=False)
            self.found.move_to_end(key)
            return self.found[key][0]


OUTCOMES = Outcomes()
