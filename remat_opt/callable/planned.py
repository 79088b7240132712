"""What a function was decided to be: its jits, and the decision for each signature that it is called with.

One `jax.jit` of ours wraps a function that stands for the user's. When that jit misses its cache it traces; the traced
function looks its program up among the decisions and writes it. Where there is no decision yet it raises `PlanNeeded`,
the call below plans outside of any trace, with the real arguments at hand, and calls again. So nothing of ours runs
once a signature is compiled, keys are jit's own, and the executable that was compiled to check a budget is the one that
the call uses.

What is known of a signature is kept by the jaxpr that JAX caches for it, weakly: it goes when JAX drops the trace
(`jax.clear_caches()`, a full cache). The user's function is traced once; a step that runs unchanged is written
from that jaxpr, too. The jits point back to the `PlannedFunction` but weakly, so that dropping it frees all that
the step closes over at once.

The jit has our compiler options once a signature is rewritten; as long as all run as they were given it has the user's
alone. Our options are those of the platform that is lowered for, which the arguments tell: each platform has its jit,
and calls go to the one of the last call that was planned. Where a second candidate for one signature has to be tried,
the jits are made anew, and other signatures compile again at their next call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import jax

from remat_opt.callable.adapters import takes_nnx_modules
from remat_opt.callable.closed_over import leaving_modules
from remat_opt.callable.compiling import compile_as_called, compile_candidate
from remat_opt.callable.donation import Undonated, find_undonated
from remat_opt.callable.jit_options import standing_for, with_ours
from remat_opt.callable.tuning import CallTimer, check_device, has_values, why_not
from remat_opt.callable.warnings_once import Reporter
from remat_opt.emit.differentiable import with_derivative_of
from remat_opt.planner.candidates import Candidate
from remat_opt.planner.decision import Decision
from remat_opt.planner.fallback import failure_note, of_symbolic_shapes, original_after, unread
from remat_opt.planner.planning import Tune
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.planner.step import decide_step, read_step
from remat_opt.planner.tuning import Tuner, not_tuned
from remat_opt.rewrites.captured import dynamic_leaves
from remat_opt.search import Solution
from remat_opt.targets import Figures, Target, resolve_target
from remat_opt.targets.options import platform_of
from remat_opt.trace import compat


class PlanNeeded(Exception):
    """Raised while tracing: this signature has no decision yet."""


class PlannedFunction:
    """The jits of one function, and what was decided for its signatures.

    Args:
        fun: the function.
        settings: what the user asked for.
        options: of `jax.jit`.
        is_plain: see `OptimizedFunction`.
    """

    def __init__(self, fun: Callable, settings: Settings, options: dict[str, Any], is_plain: bool):
        self._fun = fun
        self._is_plain = is_plain
        self._settings = settings
        self._options = options
        self.plain: Any = jax.jit(leaving_modules(fun), **options)
        self._jits: dict[str, Any] = {}  # by the platform whose compiler options they have
        self.jitted: Any = None  # the one of them that calls go to
        self._inner: Any = jax.jit(standing_for(fun, weakref.WeakMethod(self._write_inside)), **options)
        # All by the plain step's jaxpr, which JAX's caches hold, and nothing here does.
        self._decisions: MutableMapping[Any, Decision] = weakref.WeakKeyDictionary()
        self._provisional: MutableMapping[Any, Decision] = weakref.WeakKeyDictionary()  # where nothing was compiled
        self._written: MutableMapping[Any, Solution] = weakref.WeakKeyDictionary()  # what the present jits have traced
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()  # where errors are not to be raised, what was compiled
        self._with_ours = False  # whether the present jit has our compiler options
        self._lock = threading.RLock()
        self._handed = threading.local()
        self._reporter = Reporter(fun, settings)

    @property
    def target(self) -> Target:
        """The device that it is planned for."""
        return resolve_target(self._settings.target)

    @property
    def name(self) -> str:
        """The function's."""
        return self._reporter.name

    def clear_cache(self) -> None:
        """Forget all plans and compiled steps."""
        with self._lock:
            self._decisions.clear()
            self._provisional.clear()
            self.plain.clear_cache()
            self._inner.clear_cache()
            self._drop_compiled()

    def undonated(self, decision: Decision, args: tuple) -> Undonated | None:
        """State among these arguments that comes back as results and is not donated; None where it is little."""
        captured, needs = decision.prepared.captured, decision.plan.predicted.peak_bytes
        if not captured.original.outputs:  # a step that was not read
            return None
        several = decision.is_unchanged
        return find_undonated(captured, self._fun, self._options, args, temp_bytes=needs, several=several)

    # Planning on a miss

    def with_plan(self, use: Callable[[Any], Any], args: tuple, kwargs: dict, *, compiling: bool = False) -> Any:
        """What is asked of the jit for these arguments, planned first where there is no decision yet.

        Args:
            use: calls, lowers or traces the jit.
            args: of the function.
            kwargs: of the function.
            compiling: whether this is a call.
        """
        try:
            return use(self.jit_for(args, kwargs, calling=compiling))
        except PlanNeeded:
            pass  # leave the handler, so that later errors do not carry it
        decision = self.decision(args, kwargs)
        if self._settings.on_error == "plain" and not decision.is_unchanged:
            decision = self._prove(decision, args, kwargs, compiling)
        with self._hand(decision.prepared, decision.solution):
            found = use(self.jit_for(args, kwargs, calling=compiling))
        if self._is_untimed(self.plain.trace(*args, **kwargs).jaxpr, args, kwargs):
            self._drop_compiled(self._with_ours)
        return found

    def _prove(self, decision: Decision, args: tuple, kwargs: dict, compiling: bool) -> Decision:
        """The decision if it can be written, and compiled where asked, else to run the original step. A call
        uses what was compiled here."""
        key = self.plain.trace(*args, **kwargs).jaxpr
        stage = "writing"
        try:
            with self._hand(decision.prepared, decision.solution):
                lowered = self.jit_for(args, kwargs).lower(*args, **kwargs)
                stage = "compiling"
                if compiling:
                    lowered.compile()
                    self._proven.add(key)
        except Exception as error:
            with self._lock:
                decision = original_after(error, f"{stage} the rewritten step", decision.prepared, self._settings)
                if key in self._decisions:
                    self._decisions[key] = decision
                self._drop_compiled(any(not one.is_unchanged for one in self._decisions.values()))
            self._reporter.report(decision)
        return decision

    def decision(self, args: tuple, kwargs: dict) -> Decision:
        """What was decided for these arguments, now or before."""
        with self._lock:
            started = time.perf_counter()
            traced = self.plain.trace(*args, **kwargs)
            key = traced.jaxpr
            # Inside another transform nothing can be compiled: what is decided there is no promise for calls outside.
            provisional = self._settings.budget.has_limit and not compat.outside_of_any_trace()
            provisional = provisional or self._is_untimed(key, args, kwargs)
            decisions = self._provisional if provisional else self._decisions
            if key in decisions:
                return decisions[key]
            decision = self._decide_traced(traced, started, args, kwargs)
            # What is neither traced, read nor compiled is searched: the stages are all of the time since the call.
            seconds = decision.prepared.seconds
            others = sum(spent for stage, spent in seconds.items() if stage != "search")
            seconds["search"] = time.perf_counter() - started - others
            if not decision.prepared.captured.closed_over:
                decisions[key] = decision
            rewritten = any(not one.is_unchanged for one in (decision, *self._decisions.values()))
            is_other = self._written.get(key, decision.solution) is not decision.solution
            if rewritten != self._with_ours or is_other or self._is_untimed(key, args, kwargs):
                self._drop_compiled(rewritten)
            self._reporter.report(decision)  # last: where warnings are errors, the next call runs what was decided
            if compat.outside_of_any_trace():
                self._reporter.report_undonated(decision, self.undonated(decision, args))
            return decision

    def _decide_traced(self, traced: Any, started: float, args: tuple, kwargs: dict) -> Decision:
        record = compat.own_copy(traced)
        if symbolic := compat.symbolic_inputs(traced):
            return of_symbolic_shapes(record, self.target, self._settings, symbolic)
        try:
            prepared, failure = read_step(record, self._settings, self._options, (args, kwargs)), None
        except Exception as error:
            if self._settings.on_error == "raise":
                raise
            prepared, failure = unread(record, self.target), error
        prepared.seconds["trace"] = time.perf_counter() - started - prepared.seconds["graph"]
        if failure is not None:
            return original_after(failure, "reading the step", prepared, self._settings)
        return self._decide(prepared, args, kwargs)

    def _decide(self, prepared: Prepared, args: tuple, kwargs: dict) -> Decision:
        outside = compat.outside_of_any_trace()
        measure = functools.partial(self.measure, args, kwargs) if outside and self._settings.verify else None
        try:
            tune = self._tune_for(prepared, args, kwargs) if self._settings.tune else None
            return decide_step(prepared, self._settings, self._options, measure, tune)
        except Exception as error:
            # The present jit may hold a candidate for this signature, which the next call would run.
            self._drop_compiled(any(not one.is_unchanged for one in self._decisions.values()))
            if self._settings.on_error == "raise":
                raise
            return original_after(error, "planning", prepared, self._settings)

    def measure(self, args: tuple, kwargs: dict, prepared: Prepared, solution: Solution | None) -> Figures:
        """Compile a candidate (None: the original step) for the target."""
        if prepared.target.name != resolve_target(None).name:
            return compile_candidate(prepared, solution, self._options)
        # A fraction is one of the plain step under our options, so that it speaks of the rewriting alone.
        ours = solution is None and self._settings.budget.fraction is not None
        if solution is None:
            prepared = prepared.unchanged
            solution = prepared.problem.plain
        ours, key = ours or not Candidate(prepared, solution).is_unchanged, self.plain.trace(*args, **kwargs).jaxpr
        if ours != self._with_ours or self._written.get(key, solution) is not solution:
            self._drop_compiled(ours)  # this jit holds another candidate for the same signature
        with self._hand(prepared, solution):
            return compile_as_called(self.jit_for(args, kwargs), prepared.target, args, kwargs)

    # Tuning

    def _is_untimed(self, key: Any, args: tuple, kwargs: dict) -> bool:
        """Whether plans are to be timed, and cannot be on these arguments: a call that has values decides anew."""
        return self._settings.tune > 0 and key not in self._decisions and not has_values(args, kwargs)

    def _tune_for(self, prepared: Prepared, args: tuple, kwargs: dict) -> Tune | None:
        """What times plans on these arguments; None where they have no values."""
        check_device(prepared.target)
        if not has_values(args, kwargs):
            return None
        if why := why_not(prepared):
            self._reporter.warn(f"{self.name}: not tuned: {why}")
            return lambda planner, decision: not_tuned(decision, why)
        timer = CallTimer(self, args, kwargs)
        return lambda planner, decision: Tuner(planner, decision, timer, self._settings.tune).run()

    @property
    def compiled(self) -> tuple[Any, ...]:
        """The jits, and what they have compiled."""
        return self._jits, dict(self._written), self._with_ours

    @compiled.setter
    def compiled(self, before: tuple[Any, ...]) -> None:
        self._drop_compiled()
        self._jits, written, self._with_ours = before
        self._written.update(written)

    def call_candidate(self, candidate: Candidate, args: tuple, kwargs: dict) -> Any:
        """Run the candidate that the present jit holds for these arguments."""
        with self._hand(candidate.prepared, candidate.solution):
            return self.jit_for(args, kwargs)(*args, **kwargs)

    @contextlib.contextmanager
    def _hand(self, prepared: Prepared, solution: Solution) -> Iterator[None]:
        """What the next trace on this thread is to write."""
        self._handed.candidate = (prepared, solution)
        try:
            yield
        finally:
            self._handed.candidate = None

    def _drop_compiled(self, with_ours: bool = False) -> None:
        self._jits, self.jitted = {}, None
        self._written.clear()
        self._proven.clear()
        self._with_ours = with_ours

    # Writing, while jax.jit traces

    def jit_for(self, args: tuple, kwargs: dict, *, calling: bool = False) -> Any:
        """The jit with the compiler options of the platform that these arguments are lowered for; the one that later
        calls go to where this is a call."""
        with self._lock:
            platform, options = "", self._options
            if self._with_ours:
                platform = platform_of(self.plain.trace(*args, **kwargs), self.target)
                options = with_ours(self._options, platform, self._settings.offload)
            if platform not in self._jits:
                self._jits[platform] = jax.jit(standing_for(self._fun, weakref.WeakMethod(self._write)), **options)
            if calling:
                self.jitted = self._jits[platform]
                self.report_call(args, kwargs)
            return self._jits[platform]

    def report_call(self, args: tuple, kwargs: dict) -> None:
        """Warn where what was decided for these arguments is for another device than theirs."""
        if self._decisions and (decision := self._decisions.get(self.plain.trace(*args, **kwargs).jaxpr)):
            self._reporter.report_call(decision)

    def _candidate(self, traced: Any) -> tuple[Prepared, Solution]:
        handed = getattr(self._handed, "candidate", None)
        if handed is not None:
            return handed
        key = traced.jaxpr
        decision = self._decisions.get(key)
        if decision is None:
            raise PlanNeeded
        if self._settings.on_error == "plain" and not decision.is_unchanged and key not in self._proven:
            raise PlanNeeded
        return decision.prepared, decision.solution

    def _write(self, args: tuple, kwargs: dict) -> Any:
        if compat.outside_of_any_trace():
            return self._fun(*args, **kwargs)  # under jax.disable_jit
        if self._is_plain and takes_nnx_modules(args, kwargs):
            raise PlanNeeded  # as trees they would not be updated
        traced = self.plain.trace(*args, **kwargs)
        prepared, solution = self._candidate(traced)
        self._written[traced.jaxpr] = solution
        leaves = [*compat.closed_over_tracers(traced), *dynamic_leaves(args, kwargs)]
        if Candidate(prepared, solution).is_unchanged:  # from its jaxpr: the user's function is not called again
            results = compat.function_of_jaxpr(traced)(*leaves)
        else:
            results = prepared.emit(solution, leaves)
        return jax.tree.unflatten(traced.out_tree, results)

    # Inside another transform

    def call_inside(self, args: tuple, kwargs: dict) -> Any:
        """The planned step while an outer transform traces."""
        decision = self.decision(args, kwargs)
        if decision.is_unchanged:
            return self.plain(*args, **kwargs)
        self._reporter.report_call(decision)
        if platform_of(decision.prepared.captured.traced, self.target) == "cpu":
            self._reporter.warn(
                "called inside another jit, grad, vmap or scan: compiler options cannot be set there, so that nothing "
                "will be saved on the CPU. Give remat_opt.optimize the outermost function instead of jax.jit"
            )
        try:
            with self._hand(decision.prepared, decision.solution):
                return self._inner(*args, **kwargs)
        except Exception as error:
            if self._settings.on_error == "raise":
                raise
            self._reporter.warn(
                f"{self._reporter.name}: {failure_note('writing', error)}; the step runs as it was given"
            )
            return self.plain(*args, **kwargs)

    def _write_inside(self, args: tuple, kwargs: dict) -> Any:
        traced = self.plain.trace(*args, **kwargs)
        prepared, solution = self._candidate(traced)
        emit = functools.partial(_flat_call, prepared, solution)
        leaves = [*compat.closed_over_tracers(traced), *dynamic_leaves(args, kwargs)]
        results = with_derivative_of(compat.function_of_jaxpr(traced), emit, leaves, prepared.captured.program.effects)
        return jax.tree.unflatten(traced.out_tree, results)


def _flat_call(prepared: Prepared, solution: Solution, *leaves: Any) -> list[Any]:
    return prepared.emit(solution, leaves)
