"""`OptimizedFunction`: a planned step, called like a `jax.jit` function.

An inner `jax.jit` wraps a function that stands for the user's. On a cache miss it traces. The traced function looks up
the decision for its program and emits the rewritten step. If there is no decision yet, it raises `_PlanNeeded`; the
caller then plans outside of any trace, with the concrete arguments, and calls again. This way no code of ours runs once
a signature is compiled, the cache keys are those of `jax.jit`, and the executable that was compiled to check a budget
is the one that the call uses.

Decisions are cached weakly, by the jaxpr that JAX caches for a signature: they go when JAX drops the trace
(`jax.clear_caches()`, a full cache). The user's function is traced once; an unchanged step is emitted from that jaxpr,
too. References back to the `OptimizedFunction` are weak, so that dropping it frees everything the step closes over.

The jit gets our compiler options as soon as one signature is rewritten; until then it has the user's options alone.
Our options depend on the platform that is lowered for, which follows from the arguments. So each platform has a jit of
its own, and calls go to the jit of the last planned call. To try a second candidate for one signature, all jits are
made anew, and other signatures compile again at their next call.
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

from remat_opt.callable.adapters import AdaptedFunction, lifted, takes_nnx_modules
from remat_opt.callable.bound import BoundFunction
from remat_opt.callable.closed_over import leaving_modules
from remat_opt.callable.compiling import compile_as_called, compile_candidate
from remat_opt.callable.donation import Undonated, find_undonated
from remat_opt.callable.jit_options import standing_for, with_ours
from remat_opt.callable.warnings_once import Teller
from remat_opt.emit.differentiable import with_derivative_of
from remat_opt.planner.decision import Decision, runs_as_given
from remat_opt.planner.fallback import as_given_after, failure_note, of_symbolic_shapes, unread
from remat_opt.planner.plan import Plan
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings
from remat_opt.planner.step import decide_step, read_step
from remat_opt.report.explain import Explanation, explain
from remat_opt.rewrites.captured import dynamic_leaves
from remat_opt.search import Solution
from remat_opt.targets import Figures, Target, resolve_target
from remat_opt.targets.options import platform_of
from remat_opt.trace import compat


class _PlanNeeded(Exception):
    """Raised while tracing: this signature has no decision yet."""


class OptimizedFunction:
    """A training step that recomputes instead of saving. It is called like the `jax.jit` of the original function.

    `optimize` returns it. Besides `lower`, `trace` and `eval_shape` it has `plan`, `explain` and `jaxpr`.

    Args:
        fun: the function.
        settings: what the user asked for.
        options: of `jax.jit`.
        is_plain: the function was given without a jit; nnx modules among its arguments are then updated in place, as by
            `nnx.jit`. Under a user's `jax.jit` they are pytrees, and stay as they are.
    """

    def __init__(self, fun: Callable, settings: Settings, options: dict[str, Any], is_plain: bool = False):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._is_plain = is_plain
        self._settings = settings
        self._options = options
        self._plain: Any = jax.jit(leaving_modules(fun), **options)
        self._jits: dict[str, Any] = {}  # by the platform whose compiler options they have
        self._jitted: Any = None  # the one of them that calls go to
        self._inner: Any = jax.jit(standing_for(fun, weakref.WeakMethod(self._write_inside)), **options)
        # All by the plain step's jaxpr, which JAX's caches hold, and nothing here does.
        self._decisions: MutableMapping[Any, Decision] = weakref.WeakKeyDictionary()
        self._provisional: MutableMapping[Any, Decision] = weakref.WeakKeyDictionary()  # where nothing was compiled
        self._written: MutableMapping[Any, Solution] = weakref.WeakKeyDictionary()  # what the present jits have traced
        self._proven: weakref.WeakSet[Any] = weakref.WeakSet()  # where errors are not to be raised, what was compiled
        self._with_ours = False  # whether the present jit has our compiler options
        self._lock = threading.RLock()
        self._handed = threading.local()
        self._teller = Teller(fun, settings)
        self._delegate: AdaptedFunction | None = None  # once it has been called with modules

    @property
    def original(self) -> Callable:
        """The user's function."""
        return self._fun

    @property
    def options(self) -> dict[str, Any]:
        """The user's options of `jax.jit`, without ours."""
        return dict(self._options)

    @property
    def settings(self) -> Settings:
        """What the user asked for."""
        return self._settings

    @property
    def jit_description(self) -> compat.JitDescription:
        """The user's function and its `jax.jit` options."""
        return compat.JitDescription(self._fun, self.options, self._is_plain)

    @property
    def target(self) -> Target:
        """The device that it is planned for."""
        return resolve_target(self._settings.target)

    def __repr__(self) -> str:
        return f"<remat_opt.optimize({self._teller.name})>"

    def __reduce__(self) -> Any:
        # Plans and compiled steps stay here.
        return OptimizedFunction, (self._fun, self._settings, self._options, self._is_plain)

    # Calling

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundFunction(self, instance)

    def __call__(self, *args, **kwargs):
        if self._delegate is not None:
            return self._delegate(*args, **kwargs)
        if not compat.outside_of_any_trace():
            if delegate := self._for_modules(args, kwargs):
                return delegate(*args, **kwargs)
            return self._call_inside(args, kwargs)
        try:
            return (self._jitted or self._jit_for(args, kwargs, calling=True))(*args, **kwargs)
        except _PlanNeeded:
            pass
        except jax.errors.JaxRuntimeError:
            if self._jit_for(args, kwargs) is self._jitted:
                raise  # else it was the compiler of another platform than in the calls before
        except Exception:
            if not self._for_modules(args, kwargs):  # jax.jit may not take them as arguments
                raise
        if delegate := self._for_modules(args, kwargs):
            return delegate(*args, **kwargs)
        return self._with_plan(lambda jitted: jitted(*args, **kwargs), args, kwargs, compiling=True)

    def _for_modules(self, args: tuple, kwargs: dict) -> AdaptedFunction | None:
        """The adapter that replaces a plain function from its first call with modules on; None without modules."""
        if self._delegate is None and self._is_plain:
            self._delegate = lifted(self._fun, self._options, self._make_inner, args, kwargs)
        return self._delegate

    def _make_inner(self, description: compat.JitDescription) -> OptimizedFunction:
        return OptimizedFunction(description.fun, self._settings, description.options)

    def lower(self, *args, **kwargs):
        """As `jax.jit(fun).lower`: the optimised step, lowered for these arguments."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.lower(*args, **kwargs)
        return self._with_plan(lambda jitted: jitted.lower(*args, **kwargs), args, kwargs)

    def trace(self, *args, **kwargs):
        """As `jax.jit(fun).trace`: the optimised step, traced for these arguments."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.trace(*args, **kwargs)
        return self._with_plan(lambda jitted: jitted.trace(*args, **kwargs), args, kwargs)

    def eval_shape(self, *args, **kwargs):
        """As `jax.jit(fun).eval_shape`; nothing is planned."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.eval_shape(*args, **kwargs)
        return self._plain.eval_shape(*args, **kwargs)

    def jaxpr(self, *args, **kwargs):
        """The closed jaxpr of the optimised step; each recomputed segment is one `checkpoint` equation."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.jaxpr(*args, **kwargs)
        return self.trace(*args, **kwargs).jaxpr

    def plan(self, *args, **kwargs) -> Plan:
        """What was decided for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.plan(*args, **kwargs)
        return self._decision(args, kwargs).plan

    def explain(self, *args, **kwargs) -> Explanation:
        """What is saved, what is recomputed, why, and what it costs; `print` it, or `.save("picture.png")`."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.explain(*args, **kwargs)
        return explain(self._decision(args, kwargs))

    def undonated(self, *args, **kwargs) -> Undonated | None:
        """State among these arguments that comes back as results and is not donated; None where it is little."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.ask(lambda inner, a, k: inner.undonated(*a, **k), args, kwargs)
        return self._undonated(self._decision(args, kwargs), args)

    def _undonated(self, decision: Decision, args: tuple) -> Undonated | None:
        if not decision.prepared.captured.given.outputs:  # a step that was not read
            return None
        return find_undonated(
            decision.prepared.captured,
            self._fun,
            self._options,
            args,
            temp_bytes=decision.plan.predicted.peak_bytes,
            several=decision.runs_as_given,
        )

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of this function, or of what stands in for it when called with modules."""
        if delegate := self._for_modules(args, kwargs):
            return delegate.ask(question, args, kwargs)
        return question(self, args, kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and compiled steps."""
        with self._lock:
            self._decisions.clear()
            self._provisional.clear()
            self._plain.clear_cache()
            self._inner.clear_cache()
            self._forget_compiled()

    _clear_cache = clear_cache  # as tests of jitted functions call it

    def _cache_size(self) -> int:
        """As of `jax.jit(fun)`: how many signatures of calls are compiled at present."""
        return self._jitted._cache_size() if self._jitted is not None else 0

    # Planning on a miss

    def _with_plan(self, use: Callable[[Any], Any], args: tuple, kwargs: dict, *, compiling: bool = False) -> Any:
        try:
            return use(self._jit_for(args, kwargs, calling=compiling))
        except _PlanNeeded:
            pass  # leave the handler, so that later errors do not carry it
        decision = self._decision(args, kwargs)
        if self._settings.on_error == "plain" and not decision.runs_as_given:
            decision = self._prove(decision, args, kwargs, compiling)
        with self._hand(decision.prepared, decision.solution):
            return use(self._jit_for(args, kwargs, calling=compiling))

    def _prove(self, decision: Decision, args: tuple, kwargs: dict, compiling: bool) -> Decision:
        """Return the decision if it can be emitted (and, if asked, compiled); else the decision to change nothing. A
        later call uses what was compiled here."""
        key = self._plain.trace(*args, **kwargs).jaxpr
        stage = "writing"
        try:
            with self._hand(decision.prepared, decision.solution):
                lowered = self._jit_for(args, kwargs).lower(*args, **kwargs)
                stage = "compiling"
                if compiling:
                    lowered.compile()
                    self._proven.add(key)
        except Exception as error:
            with self._lock:
                decision = as_given_after(error, f"{stage} the rewritten step", decision.prepared, self._settings)
                if key in self._decisions:
                    self._decisions[key] = decision
                self._forget_compiled(any(not one.runs_as_given for one in self._decisions.values()))
            self._teller.tell(decision)
        return decision

    def _decision(self, args: tuple, kwargs: dict) -> Decision:
        with self._lock:
            started = time.perf_counter()
            traced = self._plain.trace(*args, **kwargs)
            key = traced.jaxpr
            # Inside another transform nothing can be compiled: what is decided there is no promise for calls outside.
            provisional = self._settings.budget.is_promise and not compat.outside_of_any_trace()
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
            rewritten = any(not one.runs_as_given for one in (decision, *self._decisions.values()))
            if rewritten != self._with_ours or self._written.get(key, decision.solution) is not decision.solution:
                self._forget_compiled(rewritten)
            self._teller.tell(decision)  # last: where warnings are errors, the next call runs what was decided
            if compat.outside_of_any_trace():
                self._teller.tell_undonated(decision, self._undonated(decision, args))
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
            return as_given_after(failure, "reading the step", prepared, self._settings)
        return self._decide(prepared, args, kwargs)

    def prepare(self, *args, **kwargs) -> Prepared:
        """Trace and read the step for these arguments, without searching.

        Raises:
            ValueError: shapes are symbolic.
        """
        traced = self._plain.trace(*args, **kwargs)
        if symbolic := compat.symbolic_inputs(traced):
            raise ValueError(f"expected shapes of numbers, whose bytes can be counted, got {symbolic[0]}")
        return read_step(traced, self._settings, self._options, (args, kwargs))

    def _decide(self, prepared: Prepared, args: tuple, kwargs: dict) -> Decision:
        outside = compat.outside_of_any_trace()
        measure = functools.partial(self._measure, args, kwargs) if outside and self._settings.verify else None
        try:
            return decide_step(prepared, self._settings, self._options, measure)
        except Exception as error:
            # The present jit may hold a candidate for this signature, which the next call would run.
            self._forget_compiled(any(not one.runs_as_given for one in self._decisions.values()))
            if self._settings.on_error == "raise":
                raise
            return as_given_after(error, "planning", prepared, self._settings)

    def _measure(self, args: tuple, kwargs: dict, prepared: Prepared, solution: Solution | None) -> Figures:
        """Compile a candidate (None: the step as it was given) for the target."""
        if prepared.target.name != resolve_target(None).name:
            return compile_candidate(prepared, solution, self._options.get("compiler_options"))
        # A fraction is one of the plain step under our options, so that it speaks of the rewriting alone.
        ours = solution is None and self._settings.budget.fraction is not None
        if solution is None:
            prepared = prepared.unchanged
            solution = prepared.problem.plain
        ours = ours or not runs_as_given(prepared, solution)
        if ours != self._with_ours or self._plain.trace(*args, **kwargs).jaxpr in self._written:
            self._forget_compiled(ours)  # this jit holds another candidate for the same signature
        with self._hand(prepared, solution):
            return compile_as_called(self._jit_for(args, kwargs), prepared.target, args, kwargs)

    @contextlib.contextmanager
    def _hand(self, prepared: Prepared, solution: Solution) -> Iterator[None]:
        """What the next trace on this thread is to write."""
        self._handed.candidate = (prepared, solution)
        try:
            yield
        finally:
            self._handed.candidate = None

    def _forget_compiled(self, with_ours: bool = False) -> None:
        self._jits, self._jitted = {}, None
        self._written.clear()
        self._proven.clear()
        self._with_ours = with_ours

    # Writing, while jax.jit traces

    def _jit_for(self, args: tuple, kwargs: dict, *, calling: bool = False) -> Any:
        """The jit with the compiler options of the platform that these arguments are lowered for; the one that later
        calls go to where this is a call."""
        with self._lock:
            platform, options = "", self._options
            if self._with_ours:
                platform = platform_of(self._plain.trace(*args, **kwargs), self.target)
                options = with_ours(self._options, platform)
            if platform not in self._jits:
                self._jits[platform] = jax.jit(standing_for(self._fun, weakref.WeakMethod(self._write)), **options)
            if calling:
                self._jitted = self._jits[platform]
            return self._jits[platform]

    def _candidate(self, traced: Any) -> tuple[Prepared, Solution]:
        handed = getattr(self._handed, "candidate", None)
        if handed is not None:
            return handed
        key = traced.jaxpr
        decision = self._decisions.get(key)
        if decision is None:
            raise _PlanNeeded
        if self._settings.on_error == "plain" and not decision.runs_as_given and key not in self._proven:
            raise _PlanNeeded
        return decision.prepared, decision.solution

    def _write(self, args: tuple, kwargs: dict) -> Any:
        if compat.outside_of_any_trace():
            return self._fun(*args, **kwargs)  # under jax.disable_jit
        if self._is_plain and takes_nnx_modules(args, kwargs):
            raise _PlanNeeded  # as trees they would not be updated
        traced = self._plain.trace(*args, **kwargs)
        prepared, solution = self._candidate(traced)
        self._written[traced.jaxpr] = solution
        leaves = [*compat.closed_over_tracers(traced), *dynamic_leaves(args, kwargs)]
        if runs_as_given(prepared, solution):  # from its jaxpr: the user's function is not called again
            results = compat.function_of_jaxpr(traced)(*leaves)
        else:
            results = prepared.emit(solution, leaves)
        return jax.tree.unflatten(traced.out_tree, results)

    # Inside another transform

    def _call_inside(self, args: tuple, kwargs: dict) -> Any:
        decision = self._decision(args, kwargs)
        if decision.runs_as_given:
            return self._plain(*args, **kwargs)
        if platform_of(decision.prepared.captured.traced, self.target) == "cpu":
            self._teller.warn(
                "called inside another jit, grad, vmap or scan: compiler options cannot be set there, so that nothing "
                "will be saved on the CPU. Give remat_opt.optimize the outermost function instead of jax.jit"
            )
        try:
            with self._hand(decision.prepared, decision.solution):
                return self._inner(*args, **kwargs)
        except Exception as error:
            if self._settings.on_error == "raise":
                raise
            self._teller.warn(f"{self._teller.name}: {failure_note('writing', error)}; the step runs as it was given")
            return self._plain(*args, **kwargs)

    def _write_inside(self, args: tuple, kwargs: dict) -> Any:
        traced = self._plain.trace(*args, **kwargs)
        prepared, solution = self._candidate(traced)
        emit = functools.partial(_flat_call, prepared, solution)
        leaves = [*compat.closed_over_tracers(traced), *dynamic_leaves(args, kwargs)]
        results = with_derivative_of(compat.function_of_jaxpr(traced), emit, leaves, prepared.captured.program.effects)
        return jax.tree.unflatten(traced.out_tree, results)


def _flat_call(prepared: Prepared, solution: Solution, *leaves: Any) -> list[Any]:
    return prepared.emit(solution, leaves)
