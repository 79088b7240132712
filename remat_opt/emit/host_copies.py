"""Emits the transfers of a schedule: `jax.device_put` to the host's memory and back, with what fixes their times.

XLA makes both copies asynchronous, and starts a copy out as late as it may. So the op before which a value has to be
gone waits, by a barrier, for the copy; and a copy back waits for the newest value at the place where it is to begin.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax

from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Schedule


class HostCopies:
    """The copies of one schedule while it is emitted. The host's copy of a value has the id `~value`."""

    def __init__(self, graph: Graph, schedule: Schedule):
        self.graph = graph
        self.outputs = frozenset(graph.outputs)
        self.values = {one.value for one in schedule.transfers}
        self.gone: dict[int, list[int]] = {}  # by places
        self.back: dict[int, list[int]] = {}
        for one in schedule.transfers:
            self.gone.setdefault(one.gone, []).append(one.value)
            self.back.setdefault(one.back, []).append(one.value)
        self.latest = -1  # the value that was made last, results apart: a barrier may copy what is donated

    def note_made(self, made: Collection[int], environment: dict[int, Any]) -> None:
        """Begin the copies of values that an op has made."""
        for value in self.values.intersection(made):
            environment[~value] = jax.device_put(environment[value], jax.memory.Space.Host)
            self.values.remove(value)
        self.latest = next((value for value in made if value not in self.outputs), self.latest)

    def waits_for(self, place: int, reads: Sequence[int], over: int | None) -> list[int]:
        """What goes through one barrier where copies out have to be done: these, and the largest of what is read, but
        for `over`, which the op writes its result over, if there is another."""
        if place not in self.gone:
            return []
        made = [value for value in reads if self.graph.producer[value] >= 0]
        waits = max(made, key=lambda value: (value != over, self.graph.sizes[value], value), default=self.latest)
        return [*(~value for value in self.gone[place]), waits]

    def begins_at(self, place: int) -> list[int]:
        """What goes through one barrier where copies back begin."""
        return [*(~value for value in self.back[place]), self.latest] if place in self.back else []

    def bring_back(self, place: int, environment: dict[int, Any]) -> list[int]:
        """Begin the copies back, of values that the environment has from then on."""
        for value in self.back.get(place, ()):
            environment[value] = jax.device_put(environment[~value], jax.memory.Space.Device)
        return self.back.get(place, [])
