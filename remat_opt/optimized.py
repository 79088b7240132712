"""`OptimizedFunction`: a decision inside a function that is called like `jax.jit`'s.

One `jax.jit` of ours wraps a function that stands for the user's. When that jit misses its cache it traces; the traced
function looks its program up among the decisions and writes it. Where there is no decision yet it raises `_PlanNeeded`,
the call below plans outside of any trace, with the real arguments at hand, and calls again. So nothing of ours runs
once a signature is compiled, keys are jit's own, and the executable that was compiled to check a budget is the one that
the call uses.

The jit has our compiler options once a signature is rewritten; as long as all run as they were given it has the user's
alone. Where a second candidate for one signature has to be tried, the jit is made anew, and other signatures compile
again at their next call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from remat_opt.adapters import AdaptedFunction, adapt_function_of_modules, takes_modules
from remat_opt.collectives import is_divided, told_of_explicit, without_repeats
from remat_opt.compiling import compile_as_called, compile_candidate
from remat_opt.deciding import Decision, runs_as_given
from remat_opt.falling_back import as_given_after, failure_note, unread
from remat_opt.jit_options import standing_for, with_ours
from remat_opt.plan import Plan
from remat_opt.planning import decide
from remat_opt.prepared import Prepared, prepare
from remat_opt.program import compat
from remat_opt.program.capture import capture_traced, dynamic_leaves
from remat_opt.report.explain import Explanation, explain
from remat_opt.search import Solution
from remat_opt.settings import Settings
from remat_opt.targets import Figures, Target, resolve_target
from remat_opt.targets.options import platform_of
from remat_opt.telling import Teller
from remat_opt.write.differentiable import with_derivative_of


class _PlanNeeded(Exception):
    """Raised while tracing: this signature has no decision yet."""


class OptimizedFunction:
    """A step that recomputes instead of remembering. Called like the `jax.jit` of the function it was made from.

    Made by `optimize`; has `plan`, `explain` and `jaxpr` beside `lower`, `trace` and `eval_shape`.
    """

    def __init__(self, fun: Callable, settings: Settings, options: dict[str, Any]):
        functools.update_wrapper(self, fun, updated=())
        self._fun = fun
        self._settings = settings
        self._options = options
        self._plain = jax.jit(fun, **options)
        self._jitted: Any = None
        self._inner = jax.jit(standing_for(fun, self._write_inside), **options)
        self._decisions: dict[int, Decision] = {}  # by the id of the plain step's jaxpr
        self._provisional: dict[int, Decision] = {}  # the same, where nothing could be compiled
        self._written: dict[int, Solution] = {}  # what the present jit has traced, by the same key
        self._with_ours = False  # whether the present jit has our compiler options
        self._proven: set[int] = set()  # where errors are not to be raised, what was compiled, by the same key
        self._lock = threading.RLock()
        self._handed = threading.local()
        self._teller = Teller(fun, settings)
        self._delegate: AdaptedFunction | None = None  # once the function has been called with nnx modules

    @property
    def original(self) -> Callable:
        """The function that was given."""
        return self._fun

    @property
    def options(self) -> dict[str, Any]:
        """The options of `jax.jit` that it is jitted with, without those that are ours."""
        return dict(self._options)

    @property
    def target(self) -> Target:
        """The device that it is planned for."""
        return resolve_target(self._settings.target)

    def __repr__(self) -> str:
        return f"<remat_opt.optimize({self._teller.name})>"

    def __reduce__(self) -> Any:
        return OptimizedFunction, (self._fun, self._settings, self._options)  # plans and compiled steps stay here

    # Calling

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args, **kwargs):
        if self._delegate is not None:
            return self._delegate(*args, **kwargs)
        if not compat.outside_of_any_trace():
            if delegate := self._for_modules(args, kwargs):
                return delegate(*args, **kwargs)
            return self._call_inside(args, kwargs)
        try:
            return (self._jitted or self._make_jitted())(*args, **kwargs)
        except _PlanNeeded:
            pass
        except Exception:
            if not takes_modules(args, kwargs):  # as trees of arrays modules may not even trace
                raise
        if delegate := self._for_modules(args, kwargs):
            return delegate(*args, **kwargs)
        return self._with_plan(lambda jitted: jitted(*args, **kwargs), args, kwargs, compiling=True)

    def _for_modules(self, args: tuple, kwargs: dict) -> AdaptedFunction | None:
        """What stands in for this function from the first call with an nnx module on: the same through `nnx.jit`."""
        if self._delegate is None and takes_modules(args, kwargs):
            self._delegate = adapt_function_of_modules(self._fun, self._optimize_inner, self._options)
        return self._delegate

    def _optimize_inner(self, jitted: Callable) -> OptimizedFunction:
        description = compat.describe_jit(jitted)
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
        decision = self._decision(args, kwargs)
        prepared, solution = decision.prepared, decision.solution
        return explain(
            decision.plan,
            prepared.plain_graph,
            prepared.problem.graph,
            prepared.unchanged.problem.plain.liveness,
            solution.liveness,
            prepared.names(solution.choice),
            dict(decision.seconds),
            prepared.loops.written if prepared.given and prepared.loops else (),
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
            self._forget_compiled()

    # Planning on a miss

    def _with_plan(self, use: Callable[[Any], Any], args: tuple, kwargs: dict, *, compiling: bool = False) -> Any:
        try:
            return use(self._jitted or self._make_jitted())
        except _PlanNeeded:
            pass  # leave the handler, so that later errors do not carry it
        decision = self._decision(args, kwargs)
        if self._settings.on_error == "plain" and not decision.runs_as_given:
            decision = self._prove(decision, args, kwargs, compiling)
        with self._hand(decision.prepared, decision.solution):
            return use(self._jitted or self._make_jitted())

    def _prove(self, decision: Decision, args: tuple, kwargs: dict, compiling: bool) -> Decision:
        """The decision if it can be written, and compiled where asked, else to run the step as it was given. A call
        uses what was compiled here."""
        key = id(decision.prepared.captured.traced.jaxpr)
        stage = "writing"
        try:
            with self._hand(decision.prepared, decision.solution):
                lowered = (self._jitted or self._make_jitted()).lower(*args, **kwargs)
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
            key = id(traced.jaxpr)
            # Inside another transform nothing can be compiled: what is decided there is no promise for calls outside.
            provisional = self._settings.budget.is_promise and not compat.outside_of_any_trace()
            decisions = self._provisional if provisional else self._decisions
            if key in decisions:
                return decisions[key]
            try:
                prepared, failure = self._prepare(traced, args, kwargs), None
            except Exception as error:
                if self._settings.on_error == "raise":
                    raise
                prepared, failure = unread(traced, self.target), error
            prepared.seconds["trace"] = time.perf_counter() - started - prepared.seconds["graph"]
            if failure is None:
                decision = self._decide(prepared, args, kwargs)
            else:
                decision = as_given_after(failure, "reading the step", prepared, self._settings)
            self._teller.tell(decision)
            if not prepared.captured.closed_over:
                decisions[key] = decision
            rewritten = any(not one.runs_as_given for one in (decision, *self._decisions.values()))
            if rewritten != self._with_ours or self._written.get(key, decision.solution) is not decision.solution:
                self._forget_compiled(rewritten)
            return decision

    def prepare(self, *args, **kwargs) -> Prepared:
        """Trace and read the step for these arguments, without searching."""
        return self._prepare(self._plain.trace(*args, **kwargs), args, kwargs)

    def _prepare(self, traced: Any, args: tuple, kwargs: dict) -> Prepared:
        settings = self._settings
        target = resolve_target(settings.target)
        captured = capture_traced(traced, platform=target.platform, keep_checkpoints=settings.keep_user_checkpoints)
        marks = "" if is_divided(captured.program, (args, kwargs), self._options) else None
        program = dataclasses.replace(captured.program, marks=marks, repeats_collectives=settings.repeat_collectives)
        return prepare(dataclasses.replace(captured, program=program), target)

    def _decide(self, prepared: Prepared, args: tuple, kwargs: dict) -> Decision:
        settings, program = self._settings, prepared.captured.program
        outside = compat.outside_of_any_trace()
        measure = functools.partial(self._measure, args, kwargs) if outside and settings.verify else None
        try:
            decision = decide(prepared, settings, measure)
            if settings.repeat_collectives or settings.plan is not None:
                return decision
            if measure is not None and program.marks is not None:
                decision = without_repeats(decision, prepared, lambda one, ask: decide(one, settings, ask), measure)
            return told_of_explicit(decision)
        except Exception as error:
            if self._settings.on_error == "raise":
                raise
            return as_given_after(error, "planning", prepared, self._settings)

    def _measure(self, args: tuple, kwargs: dict, prepared: Prepared, solution: Solution | None) -> Figures:
        """Compile a candidate (None: the step as it was given) for the target."""
        if prepared.target.name != resolve_target(None).name:
            return compile_candidate(prepared, solution, self._options.get("compiler_options"))
        if solution is None and self._settings.budget.fraction is not None:
            # A fraction is one of the plain step under our options, so that it speaks of the rewriting alone.
            return compile_as_called(jax.jit(self._fun, **with_ours(self._options)), prepared.target, args, kwargs)
        if solution is None:
            prepared = prepared.unchanged
            solution = prepared.problem.plain
        rewritten = not runs_as_given(prepared, solution)
        if rewritten != self._with_ours or id(prepared.captured.traced.jaxpr) in self._written:
            self._forget_compiled(rewritten)  # this jit holds another candidate for the same signature
        with self._hand(prepared, solution):
            return compile_as_called(self._jitted or self._make_jitted(), prepared.target, args, kwargs)

    @contextlib.contextmanager
    def _hand(self, prepared: Prepared, solution: Solution) -> Iterator[None]:
        """What the next trace on this thread is to write."""
        self._handed.candidate = (prepared, solution)
        try:
            yield
        finally:
            self._handed.candidate = None

    def _forget_compiled(self, with_ours: bool = False) -> None:
        self._jitted = None
        self._written = {}
        self._proven.clear()
        self._with_ours = with_ours

    # Writing, while jax.jit traces

    def _make_jitted(self) -> Any:
        with self._lock:
            if self._jitted is None:
                self._written = {}
                options = with_ours(self._options) if self._with_ours else self._options
                self._jitted = jax.jit(standing_for(self._fun, self._write), **options)
            return self._jitted

    def _candidate(self, traced: Any) -> tuple[Prepared, Solution]:
        handed = getattr(self._handed, "candidate", None)
        if handed is not None:
            return handed
        key = id(traced.jaxpr)
        decision = self._decisions.get(key)
        if decision is None:
            raise _PlanNeeded
        if self._settings.on_error == "plain" and not decision.runs_as_given and key not in self._proven:
            raise _PlanNeeded
        return decision.prepared, decision.solution

    def _write(self, args: tuple, kwargs: dict) -> Any:
        if compat.outside_of_any_trace():
            return self._fun(*args, **kwargs)  # under jax.disable_jit
        traced = self._plain.trace(*args, **kwargs)
        prepared, solution = self._candidate(traced)
        self._written[id(traced.jaxpr)] = solution
        if runs_as_given(prepared, solution):
            return self._fun(*args, **kwargs)
        return jax.tree.unflatten(traced.out_tree, prepared.emit(solution, dynamic_leaves(args, kwargs)))

    # Inside another transform

    def _call_inside(self, args: tuple, kwargs: dict) -> Any:
        decision = self._decision(args, kwargs)
        if decision.runs_as_given:
            return self._plain(*args, **kwargs)
        if platform_of(self._options) == "cpu":
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
