"""`Prepared`: a captured step with its graph, ready for any search, with its loops as they are or written again."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.graph.build import Bridge, build
from remat_opt.graph.cost import Rates
from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import peak_of
from remat_opt.looping import SearchedSteps, write_loops
from remat_opt.loops.choose import LoopChoices
from remat_opt.program import compat
from remat_opt.program.capture import Captured
from remat_opt.program.fingerprint import fingerprint
from remat_opt.program.inline import Program, inline
from remat_opt.program.names import name_values
from remat_opt.search import Problem, Solution
from remat_opt.targets import Target, reports_gaps_twice
from remat_opt.write.train_step import write

MOST_FORESEEN = 30_000  # equations


@dataclasses.dataclass(frozen=True, eq=False)
class Prepared:
    """A captured program with its graph, ready for any search.

    Attributes:
        captured: the program.
        bridge: its graph.
        target: whose costs the graph has.
        seconds: time spent on each stage so far.
        given: where loops were written again, the program as it was before.
        loops: what was chosen for the loops.
        in_our_order: it is written even where nothing is recomputed, so that compilers are told an order.
    """

    captured: Captured
    bridge: Bridge
    target: Target
    seconds: dict[str, float]
    given: Prepared | None = None
    loops: LoopChoices | None = None
    in_our_order: bool = False

    @property  # not cached: the copy caches this step as its original, and the two would keep each other alive
    def ordered(self) -> Prepared:
        """The same step, to be written even where nothing is recomputed: updates come as soon as they can, compilers
        are told the order of what they would do otherwise, and are asked to save memory. That alone may spare half of
        the memory."""
        return self if self.is_rewritten else self._the_same_but(in_our_order=True)

    def _the_same_but(self, **changes: Any) -> Prepared:
        """A copy with what searches remember of the graph, for changes that leave the graph as it is."""
        same = dataclasses.replace(self, **changes)
        same.__dict__["problem"] = self.problem
        if same.is_rewritten:
            same.__dict__["_original"] = self.unchanged
        return same

    def written(self, loops: LoopChoices, inside: float | None, keep_checkpoints: bool = False) -> Prepared:
        """The same step with its loops written as was chosen.

        Args:
            loops: what was chosen for its pairs.
            inside: None leaves the bodies of loops as they are. Else those that have a turning point get segments, for
                this share of what lies between their least and their plain peak.
            keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
        """
        given, aliases = self.captured.program, self.bridge.graph.aliases
        program, loops = write_loops(
            given,
            loops,
            aliases,
            self.rates,
            inside=inside,
            keep_checkpoints=keep_checkpoints,
            platform=self.target.platform,
            problems=self._bodies,
        )
        if program is given:
            return self._the_same_but(loops=loops)
        again = prepare(dataclasses.replace(self.captured, program=program), self.target)
        return dataclasses.replace(again, seconds=self.seconds, given=self, loops=loops)

    def step_search(self) -> SearchedSteps:
        """Schedules for the steps of its loops."""
        return SearchedSteps(self.rates, self.target.platform, self._bodies)

    @property
    def _bodies(self) -> dict[Any, Problem]:
        """Bodies of its loops that were searched."""
        return self.problem.memo.setdefault("bodies", {})

    def gathering_once(self, once: bool = True) -> Prepared:
        """The same step, in which inputs that devices gather are not gathered again for what is computed again."""
        if once == self.captured.program.gathers_once:
            return self
        program = dataclasses.replace(self.captured.program, gathers_once=once)
        again = prepare(dataclasses.replace(self.captured, program=program), self.target)
        return dataclasses.replace(again, seconds=self.seconds)

    @property
    def is_divided(self) -> bool:
        """Whether it runs on several devices. Its graph has the sizes on all of them together."""
        return self.captured.program.marks is not None

    @property
    def is_rewritten(self) -> bool:
        """Whether it is written even where nothing is recomputed."""
        return self.in_our_order or self.is_reformed

    @property
    def is_reformed(self) -> bool:
        """Whether operations have another form than in the step as it was given."""
        return self.given is not None or len(self.bridge.program.avals) != len(self.captured.given.avals)

    @property
    def unchanged(self) -> Prepared:
        """The step as it was given, of which nothing is written."""
        if self.given:
            return self.given.unchanged
        return self._original if self.is_rewritten else self  # cached by itself it would be in a reference cycle

    @functools.cached_property
    def _original(self) -> Prepared:
        planned = self.captured.program
        given = dataclasses.replace(
            self.captured.given, marks=planned.marks, repeats_collectives=planned.repeats_collectives
        )
        again = prepare(dataclasses.replace(self.captured, program=given), self.target, keep_scatters=True)
        return dataclasses.replace(again, seconds=self.seconds)

    @property
    def extra_seconds(self) -> float:
        """Estimated time beyond that of the step as it was given, before anything else is recomputed."""
        return self.bridge.graph.seconds - self.unchanged.bridge.graph.seconds

    @property
    def extra_flops(self) -> float:
        """The same in FLOPs."""
        return self.bridge.graph.flops - self.unchanged.bridge.graph.flops

    @property
    def rates(self) -> Rates:
        """What the target can do."""
        return _rates_of(self.target)

    @functools.cached_property
    def problem(self) -> Problem:
        """The graph as the searches see it."""
        return Problem(self.bridge.graph)

    @functools.cached_property
    def fingerprint(self) -> str:
        """What a plan must match."""
        return self.given.fingerprint if self.given else fingerprint(self.captured.program)

    @functools.cached_property
    def graph_as_given(self) -> Graph:
        """The step as it was given, as the target's compiler runs it; of a very large one as the search sees it."""
        if self.given:
            return self.given.graph_as_given
        return self.problem.kept("graph as given", self._read_as_given)  # once for all copies of the same step

    def _read_as_given(self) -> Graph:
        if not self.can_be_foreseen:
            return self.bridge.graph
        program = self.captured.given
        if program.entered_checkpoints and not compat.expands_barriers(self.target.platform):
            closed = compat.without_dead_code(self.captured.traced.jaxpr)
            program = inline(closed, with_barriers=True, keep_names=False)
        return self._compiled(program)

    @functools.cached_property
    def as_given(self) -> int:
        """Predicted peak in bytes of the step as it was given."""
        if self.given:
            return self.given.as_given
        size_of = self._allocated if self.can_be_foreseen else peak_of
        return self.problem.kept("as given", lambda: size_of(self.graph_as_given))

    @functools.cached_property
    def peak_in_order(self) -> int:
        """What the search's answers are compared with: its own peak in bytes for the step in the order given."""
        return peak_of(self.unchanged.bridge.graph)

    @property
    def can_be_foreseen(self) -> bool:
        """Whether the compilers' model reads the step as it is written: a very large one takes it long, and for that
        the search's own peak stands."""
        return len(self.captured.program.equations) <= MOST_FORESEEN

    def graph_as_written(self, solution: Solution) -> Graph:
        """The step as `emit` writes it for a solution, as the target's compiler runs it."""
        closed = jax.make_jaxpr(lambda *arguments: self.emit(solution, arguments))(*self.captured.input_avals)
        program = inline(closed, with_barriers=True, keep_names=False)
        return self._compiled(program, saving_memory=True)

    def as_written(self, solution: Solution) -> int:
        """Predicted peak in bytes of the step as it is written for a solution."""
        known = self.problem.memo.setdefault("as written", {})  # with the problem, so that no trace outlives its step
        if solution.schedule not in known:
            known[solution.schedule] = self._allocated(self.graph_as_written(solution))
        return known[solution.schedule]

    def _allocated(self, graph: Graph) -> int:
        """What the target's compiler reports as allocated for a graph."""
        platform = self.target.platform
        return allocated_by(graph, platform, gaps_twice=reports_gaps_twice(platform))

    def _compiled(self, program: Program, **options: Any) -> Graph:
        return compiled(program, self.rates, self.captured.donated, platform=self.target.platform, **options)

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
        """Names of all values: each schedule that is foreseen asks for some."""
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


def _rates_of(target: Target) -> Rates:
    return Rates(target.bandwidth, target.flops, target.counts_flops)


def _bridge(program: Program, captured: Captured, target: Target, *, keep_scatters: bool = False) -> Bridge:
    rates = _rates_of(target)
    return build(program, rates, captured.donated, platform=target.platform, keep_scatters=keep_scatters)
