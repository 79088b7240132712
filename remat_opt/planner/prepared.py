"""`Prepared`: a captured step with its graph, ready for any search, with its loops as they are or rewritten."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from remat_opt.emit.train_step import write
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import peak_of
from remat_opt.loops.choose import LoopChoices
from remat_opt.planner.loop_search import SearchedSteps, write_loops
from remat_opt.rewrites.captured import Captured
from remat_opt.rewrites.split.batch import Batch, find_batch
from remat_opt.rewrites.split.mapped import find_mapped_batch
from remat_opt.search import Problem, Solution
from remat_opt.targets import Target
from remat_opt.trace import compat
from remat_opt.trace.fingerprint import fingerprint
from remat_opt.trace.inline import Program, inline
from remat_opt.trace.names import name_values
from remat_opt.trace.placement import flat_shardings


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A captured program with its graph, ready for any search.

    Attributes:
        captured: the program.
        bridge: its graph.
        target: whose costs the graph has.
        seconds: time spent on each stage so far.
        original: the program before its loops were rewritten or its batch was split; else None.
        loops: the choices for the loops.
        reordered: emit the step even if nothing is recomputed, to fix its order for the compiler.
        chunks: into how many the batch is split; 0 where it is not.
        offloads: whether values may go to the host's memory.
    """

    captured: Captured
    bridge: Bridge
    target: Target
    seconds: dict[str, float]
    original: Prepared | None = None
    loops: LoopChoices | None = None
    reordered: bool = False
    chunks: int = 0
    offloads: bool = False

    @property  # not cached: the copy caches this step as its original, and the two would keep each other alive
    def ordered(self) -> Prepared:
        """The same step, emitted in our order even if nothing is recomputed.

        Updates run as early as they can, barriers fix the order, and the compiler is asked to save memory. This alone
        may save half of the memory.
        """
        return self if self.is_rewritten else self._replace(reordered=True)

    def _replace(self, **changes: Any) -> Prepared:
        """A copy with changed fields that shares what the searches have cached for the graph, which stays the same."""
        same = dataclasses.replace(self, **changes)
        same.__dict__["problem"] = self.problem
        if same.is_rewritten:
            same.__dict__["_original"] = self.unchanged
        return same

    def written(self, loops: LoopChoices, inside: float | None, keep_checkpoints: bool = False) -> Prepared:
        """The same step with its loops rewritten as chosen.

        Args:
            loops: the choices for its pairs.
            inside: None leaves the bodies of loops as they are. Else those that have a forward/backward boundary get
                segments, for this share of what lies between their least and their plain peak; in chunks of the batch
                all are in our order, with 1 nothing is recomputed.
            keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
        """
        original, aliases = self.captured.program, self.bridge.graph.aliases
        program, loops = write_loops(
            original,
            loops,
            aliases,
            self.rates,
            inside=inside,
            keep_checkpoints=keep_checkpoints,
            platform=self.target.platform,
            problems=self._bodies,
            orders=self.chunks > 0,
        )
        if program is original:
            return self._replace(loops=loops)
        return self.of_program(program, original=self, loops=loops, chunks=self.chunks)

    @functools.cached_property
    def batch(self) -> Batch | None:
        """The batch of the program; None where there is nothing that could be one."""
        shardings = flat_shardings(self.captured.traced)[0] if self.is_divided else ()
        found = find_batch(self.captured.program, shardings)
        if self.is_divided and (found is None or not found.can_be_split):
            return find_mapped_batch(self.captured.program) or found
        return found

    def in_chunks(self, chunks: int) -> Prepared:
        """The same step with its batch split; see `splitting.py` for what is checked before.

        Args:
            chunks: how many, one of `self.batch.numbers`.
        """
        assert self.batch is not None
        return self.of_program(self.batch.split(chunks), original=self, chunks=chunks)

    def step_search(self) -> SearchedSteps:
        """Schedules for the steps of its loops."""
        return SearchedSteps(self.rates, self.target.platform, self._bodies)

    @property
    def _bodies(self) -> dict[Any, Problem]:
        """Bodies of its loops that were searched."""
        return self.problem.memo.setdefault("bodies", {})

    def gathering_once(self, once: bool = True) -> Prepared:
        """The same step, in which inputs that devices gather are not gathered again for what is recomputed."""
        if once == self.captured.program.gathers_once:
            return self
        return self.of_program(dataclasses.replace(self.captured.program, gathers_once=once))

    def of_program(self, program: Program, **changes: Any) -> Prepared:
        """The same step with another program."""
        again = prepare(dataclasses.replace(self.captured, program=program), self.target)
        return dataclasses.replace(again, seconds=self.seconds, offloads=self.offloads, **changes)

    @property
    def is_divided(self) -> bool:
        """Whether the step runs on several devices. Its graph then has the sizes summed over all of them."""
        return self.captured.program.marks is not None

    @property
    def is_rewritten(self) -> bool:
        """Whether the step is emitted even if nothing is recomputed."""
        return self.reordered or self.is_reformed

    @functools.cached_property
    def is_reformed(self) -> bool:
        """Whether some operations differ from those of the original step."""
        ours, original = (
            [one.primitive for one in program.equations] for program in (self.bridge.program, self.captured.original)
        )
        return self.original is not None or ours != original

    @property
    def unchanged(self) -> Prepared:
        """The original step, which is not rewritten at all."""
        if self.original:
            return self.original.unchanged
        return self._original if self.is_rewritten else self  # cached by itself it would be in a reference cycle

    @functools.cached_property
    def _original(self) -> Prepared:
        planned = self.captured.program
        original = dataclasses.replace(
            self.captured.original, marks=planned.marks, repeats_collectives=planned.repeats_collectives
        )
        again = prepare(dataclasses.replace(self.captured, program=original), self.target, keep_scatters=True)
        return dataclasses.replace(again, seconds=self.seconds)

    @property
    def extra_seconds(self) -> float:
        """Estimated time minus that of the original step, before anything else is recomputed."""
        return self.bridge.graph.seconds - self.unchanged.bridge.graph.seconds

    @property
    def extra_flops(self) -> float:
        """FLOPs minus those of the original step, before anything else is recomputed."""
        return self.bridge.graph.flops - self.unchanged.bridge.graph.flops

    @property
    def rates(self) -> Rates:
        """What the target can do, and the bandwidth of its host's memory where values may go there."""
        host = self.target.host_bandwidth if self.offloads else None
        return dataclasses.replace(rates_of(self.target), host_bandwidth=host)

    @functools.cached_property
    def problem(self) -> Problem:
        """The graph as the searches see it, and what they find: for this step alone, also where graphs are equal.

        What a search was asked before may change what it finds next, and all processes have to find the same.
        """
        return Problem(self.bridge.graph, host_bandwidth=self.rates.host_bandwidth)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What a plan must match."""
        return self.original.fingerprint if self.original else fingerprint(self.captured.program)

    @functools.cached_property
    def plain_graph(self) -> Graph:
        """The original step, with the user's own checkpoints where the target's compiler honours them."""
        if self.original:
            return self.original.plain_graph
        return self.problem.cached("plain graph", self._read_plain)  # once for all copies of the same step

    def _read_plain(self) -> Graph:
        if self.captured.original.entered_checkpoints and not compat.expands_barriers(self.target.platform):
            program = inline(compat.without_dead_code(self.captured.traced.jaxpr), merge_checkpoints=False)
        else:
            program = self.unchanged.captured.program
        return _bridge(program, self.captured, self.target, keep_scatters=True, as_compiled=True).graph

    @functools.cached_property
    def plain_peak(self) -> int:
        """Predicted peak of the original step, in bytes of the device's memory."""
        return self.in_memory(peak_of(self.plain_graph))

    @functools.cached_property
    def comparable_peak(self) -> int:
        """Predicted peak of the original step by what schedules are predicted by, or `plain_peak` if that is less.

        Whether a schedule gains anything is decided by this: what compilers store beyond it, they may store in what we
        write, too.
        """
        if self.original:
            return self.original.comparable_peak
        return min(self.plain_peak, self.in_memory(self.unchanged.problem.plain.peak))

    def in_memory(self, live: int) -> int:
        """Bytes in the device's memory if `live` bytes are live. On a TPU up to half of them may be on the chip."""
        return live - min(self.target.on_chip_bytes, live // 2)

    def live_within(self, limit: int) -> int:
        """The most bytes that may be live if the device's memory has `limit` bytes; the inverse of `in_memory`."""
        return limit + min(self.target.on_chip_bytes, limit)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Types of the program's inputs, as text."""
        return tuple(f"{aval.dtype}{list(aval.shape)}" for aval in self.captured.input_avals)

    def emit(self, solution: Solution, arguments: Sequence[Any]) -> list[Any]:
        """Write a solution's schedule on the program's flat inputs, closed-over values first."""
        return write(self.bridge, solution.schedule, self.names(solution.choice), arguments)

    def names(self, choice: Choice) -> dict[int, str]:
        """Names of the saved values."""
        return {value: name for value, name in self._every_name.items() if value in choice.saved}

    @functools.cached_property
    def _every_name(self) -> dict[int, str]:
        """Names of all values."""
        program = self.bridge.program
        return name_values(program, range(len(program.avals)))


def prepare(captured: Captured, target: Target, *, keep_scatters: bool = False) -> Prepared:
    """Build the graph of a captured program with the costs of a target.

    Args:
        captured: the program.
        target: whose costs.
        keep_scatters: see `build`.
    """
    started = time.perf_counter()
    bridge = _bridge(captured.program, captured, target, keep_scatters=keep_scatters)
    return Prepared(captured, bridge, target, {"graph": time.perf_counter() - started})


def rates_of(target: Target) -> Rates:
    """What a graph's costs are made of, without the host's memory."""
    return Rates(
        target.bandwidth,
        target.flops,
        target.counts_flops,
        kernel_seconds=target.kernel_seconds,
        multiprocessors=target.multiprocessors,
    )


def _bridge(program: Program, captured: Captured, target: Target, **options: bool) -> Bridge:
    return build(program, rates_of(target), captured.donated, platform=target.platform, **options)
