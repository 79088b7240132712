"""`checkpoint` and `policy`: for authors of a loss or a library, who do not own the step.

A call traces the function, looks up the decision for that program (or makes one), and evaluates the function in
segments under `jax.checkpoint`. This happens while an outer `jax.jit` traces, or at each call if there is none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_opt.callable.adapters import AdaptedFunction, takes_equinox_modules, through_equinox
from remat_opt.callable.bound import ask
from remat_opt.callable.checkpoint_outcomes import ONE_REGION, OUTCOMES, Outcome
from remat_opt.callable.checkpoint_policy import NamesPolicy, UnderPolicy, check_as_jax, check_policy
from remat_opt.callable.resolving import resolve
from remat_opt.callable.static_arguments import statics_of
from remat_opt.callable.warning import RematWarning, callers_level
from remat_opt.emit.checkpoint import array_of, evaluate, write_segments
from remat_opt.planner.checkpoint_planning import (
    CheckpointDecision,
    choose_form,
    choose_names,
    settings_of_bodies,
    steps_at_a_time,
)
from remat_opt.planner.plan import Plan
from remat_opt.planner.segmentation import Differentiated, Loops, differentiate, jax_differentiates
from remat_opt.planner.settings import Settings, check_offload, check_settings
from remat_opt.report.explain import Explanation, explain
from remat_opt.rewrites.captured import Captured, capture_traced
from remat_opt.rewrites.loop_bodies import Body, as_body, body_of, has_loops, kept_of_a_step, loops_of, with_bodies
from remat_opt.targets import Target, resolve_target
from remat_opt.trace import compat
from remat_opt.trace.fingerprint import fingerprint
from remat_opt.trace.inline import Program

_NOT_GIVEN: Any = object()


def checkpoint(
    fun: Any = _NOT_GIVEN,
    *,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    solver: str = "auto",
    plan: Plan | None = None,
    policy: Callable[..., Any] | None = None,
    prevent_cse: bool | Sequence[Any] = True,
    concrete: bool = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    keep_user_names: bool = False,
    offload: bool = False,
) -> Any:
    """`jax.checkpoint` that finds its own policy: docs/checkpoint.md. Where you own the step, use `optimize`.

    Args:
        fun: as for `jax.checkpoint`, or what `remat_opt.optimize` takes. Without it, a decorator with these options.
        budget: None: minimum memory. `"min"`: minimum memory at any cost. Otherwise a limit on the residuals that one
            call saves between forward and backward (arguments and results not counted), met with the least extra time:
            bytes (an int, or text as "800MB"), or a fraction in (0, 1] of the residuals without checkpoints.
        target: the device to plan for ("h200", "v5e", …); default: the attached backend.
        solver: name of the search. "auto" takes the best of those whose plans `jax.checkpoint` can express.
        plan: a plan of the same function, as `.plan(*args)` gives it, to use instead of searching.
        policy: as for `jax.checkpoint`, whose result is then returned: nothing is searched, and there is no plan.
        prevent_cse: as for `jax.checkpoint`; a sequence says it for each argument, or each part of one.
        concrete: has to be False, as for `jax.checkpoint`.
        static_argnums: positions of arguments that decide what is traced; they need not be hashable.
        static_argnames: the same by name.
        keep_user_names: respect `jax.checkpoint` and `checkpoint_name` inside the function; by default, both go.
        offload: let the carry of each `lax.scan` step stay in the host's memory until the backward pass. A function
            without loops is itself treated as a loop body.

    Returns:
        A function as `fun`, with `.plan(*args)` and `.explain(*args)`, also of `jax.ShapeDtypeStruct`s.

    Raises:
        TypeError: `fun` or `policy` is no function, or `prevent_cse` neither a bool nor a sequence.
        ValueError: an option that does not exist, or one of the search beside a policy; `.plan` with a policy.
        NotImplementedError: `concrete=True`.
        PlanError: at a call, where `plan` is for another function.
    """
    searched: dict[str, Any] = {"budget": budget, "target": target, "solver": solver, "plan": plan, "offload": offload}
    check_as_jax(concrete, prevent_cse)
    check_policy(policy, **searched)
    settings = check_settings(**searched, keep_user_checkpoints=keep_user_names)
    statics = _given_statics(static_argnums, static_argnames)
    if fun is _NOT_GIVEN:
        searched |= {"policy": policy, "prevent_cse": prevent_cse, "keep_user_names": keep_user_names, **statics}
        return functools.partial(checkpoint, **searched)
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else tuple(prevent_cse)

    def make(found: compat.JitDescription) -> Callable:
        if policy is None:
            return _recomputing(_Checkpointed(found, settings, prevent_cse))
        return _recomputing(UnderPolicy(found, policy, prevent_cse))

    return resolve(fun, statics, make, "checkpoint")


def _given_statics(static_argnums: int | Sequence[int], static_argnames: str | Iterable[str]) -> dict[str, Any]:
    numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"expected static_argnums to be an int or ints, got {static_argnums!r}")
    given = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return {name: value for name, value in given.items() if value != ()}


def _recomputing(checkpointed: _Checkpointed | UnderPolicy) -> Callable:
    """A plain function in place of the user's, so that every JAX transform applies to it."""

    @functools.wraps(checkpointed.fun)
    def recomputing(*args, **kwargs):
        return checkpointed(*args, **kwargs)

    recomputing.plan = checkpointed.plan  # pyright: ignore[reportAttributeAccessIssue]
    recomputing.explain = checkpointed.explain  # pyright: ignore[reportAttributeAccessIssue]
    return recomputing


def policy(
    fun: Callable,
    *args: Any,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> NamesPolicy:
    """Which names to save, for those who place `jax.ad_checkpoint.checkpoint_name` themselves.

        names, policy = remat_opt.policy(loss_fn, params, batch, budget=0.3)
        loss_fn = jax.checkpoint(loss_fn, policy=policy)

    The prediction assumes one `jax.checkpoint` around the function, and that values between two saved names are
    recomputed when their cotangents are needed. A compiler may recompute more at once; `remat_opt.checkpoint` divides
    the function to prevent that.

    Args:
        fun: a function with names in it, as for `checkpoint`.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s; nothing runs.
        budget: None for the names with which one call needs the least memory; or bytes of residuals, or a fraction of
            those without checkpoints, as for `checkpoint`, for the least extra time. Predicted, not promised.
        target: the device to plan for; default: the attached backend.
        static_argnums: as for `checkpoint`.
        static_argnames: as for `checkpoint`.
        **kwargs: arguments of the function by name.

    Raises:
        ValueError: there is no name in the function, or nothing to differentiate.
    """
    settings = check_settings(
        budget=budget,
        target=target,
        solver="auto",
        plan=None,
        keep_user_checkpoints=True,
    )
    statics = _given_statics(static_argnums, static_argnames)
    checkpointed = resolve(fun, statics, lambda found: _Checkpointed(found, settings), "policy")
    differentiated = ask(checkpointed, lambda inner, args, kwargs: inner.differentiated(args, kwargs)[0], args, kwargs)
    names = choose_names(differentiated, settings.budget)
    return NamesPolicy(names, jax.checkpoint_policies.save_only_these_names(*names))


class _Checkpointed:
    """A function under `checkpoint`, with what was decided for its programs."""

    def __init__(
        self,
        found: compat.JitDescription,
        settings: Settings,
        prevent_cse: bool | tuple[Any, ...] = True,
        body: Body | None = None,
    ):
        """`body` says what is known of a loop's body; it is None for other functions."""
        self.found = found
        self.fun = found.fun
        self.settings = settings
        self.prevent_cse = prevent_cse
        self.body = body
        self.static = statics_of(found)
        self.delegate: AdaptedFunction | None = None

    def for_modules(self, args: tuple, kwargs: dict) -> AdaptedFunction | None:
        """What stands in for a plain function that is called with equinox modules some of whose leaves are no arrays:
        the same through `eqx.filter_jit`."""
        if not self.found.is_plain or not takes_equinox_modules(args, kwargs):
            return None
        if self.delegate is None:
            self.delegate = through_equinox(self.fun, {}, self.again)
        return self.delegate

    def again(self, found: compat.JitDescription) -> _Checkpointed:
        """Another function under the same options."""
        return _Checkpointed(found, self.settings, self.prevent_cse)

    def __call__(self, *args, **kwargs) -> Any:
        if delegate := self.for_modules(args, kwargs):
            return delegate(*args, **kwargs)
        jitted, dynamic, rest = self.static.split(args, kwargs)
        traced, captured = self.capture(jitted, dynamic, rest)
        leaves = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in jax.tree.leaves((dynamic, rest))]
        leaves = [*captured.closed_over, *leaves]
        prevent_cse = self.prevent_cse_of(len(captured.closed_over), dynamic, rest)
        outcome = self.outcome(captured)
        # Evaluate the traced program instead of calling the function again, which may update what it closes over.
        program = self.in_form(captured.program, outcome.loops, outcome.steps)
        as_it_is = functools.partial(_as_it_is, program)
        if outcome.layout is not None:
            _warn_of_remat3()
            results = write_segments(program, outcome.layout, leaves, prevent_cse)
        elif outcome.is_one_region:
            results = jax.checkpoint(as_it_is, prevent_cse=prevent_cse)(*leaves)
            results = [array_of(x, program.aval_of(out)) for x, out in zip(results, program.outputs, strict=True)]
        else:
            results = as_it_is(*leaves)
        return jax.tree.unflatten(traced.out_tree, results)

    def prevent_cse_of(self, closed_over: int, args: tuple, kwargs: dict) -> bool | tuple[bool, ...]:
        """`prevent_cse` for each leaf of a call; False for closed-over values, as in JAX."""
        if isinstance(self.prevent_cse, bool):
            return self.prevent_cse
        arguments = (args, kwargs) if kwargs else args
        return (*(False,) * closed_over, *jax.tree.leaves(jax.tree.broadcast(self.prevent_cse, arguments)))

    def plan(self, *args, **kwargs) -> Plan:
        """What was decided for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        if delegate := self.for_modules(args, kwargs):
            return delegate.plan(*args, **kwargs)
        return self.decision(args, kwargs).decision.plan

    def explain(self, *args, **kwargs) -> Explanation:
        """What is saved, what is recomputed, why, and what it costs, of the function's forward and backward pass."""
        if delegate := self.for_modules(args, kwargs):
            return delegate.explain(*args, **kwargs)
        return explain(self.decision(args, kwargs).decision)

    def ask(self, question: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`question(function, args, kwargs)` of this function, or of what stands in for it when called with modules."""
        if delegate := self.for_modules(args, kwargs):
            return delegate.ask(question, args, kwargs)
        return question(self, args, kwargs)

    def capture(self, jitted: Any, args: tuple, kwargs: dict) -> tuple[Any, Captured]:
        keep = self.settings.keep_user_checkpoints
        try:
            with contextlib.nullcontext() if keep else compat.with_known_checkpoints():
                traced = jitted.trace(*args, **kwargs)
        except jax.errors.ConcretizationTypeError as error:
            error.add_note(
                "In remat_opt.checkpoint, arguments that decide what is traced are static: write "
                "remat_opt.checkpoint(fun, static_argnums=...) or static_argnames=..."
            )
            raise
        return traced, capture_traced(traced, keep_checkpoints=keep, keep_rules=True, keep_names=keep)

    def outcome(self, captured: Captured) -> Outcome:
        if captured.program.has_references:
            return ONE_REGION  # jax.checkpoint knows what to do, and what to say
        settings = self.settings
        target = self.checked_target()
        asked = (target, settings.solver, settings.asked_budget, settings.keep_user_checkpoints, id(settings.plan))
        key = (fingerprint(captured.program), *asked, settings.offload, self.body)
        return OUTCOMES.get(key, lambda: self.decide(captured, target), settings.plan)

    def checked_target(self) -> Target:
        target = resolve_target(self.settings.target)
        check_offload(self.settings.offload, target, in_loops=True)
        if self.settings.offload and target.host_bandwidth is None:
            self.warn("nothing goes to the host: the memory of a CPU is the host's")
        return target

    def decide(self, captured: Captured, target: Target) -> Outcome:
        try:
            forms = self.forms(captured.program, target)
        except Exception as error:
            # If JAX cannot differentiate it either, JAX raises when the derivative is taken: no warning is needed.
            if jax_differentiates(captured):
                self.warn(
                    f"differentiating it failed: {type(error).__name__}: {error}; it runs under one jax.checkpoint. "
                    "JAX can differentiate it, so this is a bug in remat_opt"
                )
            return ONE_REGION
        if not forms:
            return ONE_REGION
        decision = choose_form(forms, self.settings)
        form = decision.differentiated
        return Outcome(decision.layout, decision.is_one_region, form.loops, form.steps)

    def forms(self, program: Program, target: Target) -> list[Differentiated]:
        """The function with its backward pass, with its loops in their forms; none where it has no derivative."""
        moves = self.settings.offload and target.host_bandwidth is not None
        forms: list[tuple[Loops, tuple[int, ...]]] = [(Loops.AS_GIVEN, ())]
        body = self.body
        # The steps of a chunk, which is recomputed as a whole, would run a third time.
        if has_loops(program) and (body is None or body.steps == 1 or self.settings.budget.at_any_cost):
            forms.append((Loops.RECOMPUTED, ()))
            steps = self.steps_of_chunks(program)
            if any(count > 1 for count in steps):
                forms.append((Loops.IN_CHUNKS, steps))
            # An inner loop's residuals live for only one step of the outer loop, so they are not offloaded.
            if moves and body is None:
                forms.append((Loops.ON_HOST, ()))
        elif moves and body is None:
            body = as_body(program)
            if body is None:
                self.warn("nothing goes to the host: there is no loop in it, and it hands no large array on")
        found = []
        for loops, steps in forms:
            written = self.in_form(program, loops, steps)
            form = differentiate(written, target, keep_checkpoints=self.settings.keep_user_checkpoints)
            if form is None:
                return []
            given = found[0] if found else None
            found.append(dataclasses.replace(form, loops=loops, steps=steps, body=body, given=given))
        return found

    def steps_of_chunks(self, program: Program) -> tuple[int, ...]:
        """For each loop how many steps are recomputed at a time where they are recomputed in chunks."""
        keep, found = self.settings.keep_user_checkpoints, []
        for loop in loops_of(program, keep_checkpoints=keep):
            length = loop.params["length"]
            carried = body_of(loop).kept_bytes // max(length, 1)
            # At any cost the steps of a chunk are recomputed one by one.
            kept = carried if self.settings.budget.at_any_cost else kept_of_a_step(loop)
            found.append(steps_at_a_time(length, carried, kept))
        return tuple(found)

    def in_form(self, program: Program, loops: Loops, steps: tuple[int, ...]) -> Program:
        """A program whose loops' bodies stand under `checkpoint`, too."""
        if loops is Loops.AS_GIVEN:
            return program
        settings = settings_of_bodies(self.settings, offload=loops is Loops.ON_HOST)
        prevent_cse = self.prevent_cse if isinstance(self.prevent_cse, bool) else True

        def under_checkpoint(step: Callable, body: Body) -> _Checkpointed:
            return _Checkpointed(compat.JitDescription(step, {}, is_plain=True), settings, prevent_cse, body)

        keep = self.settings.keep_user_checkpoints
        return with_bodies(program, under_checkpoint, keep_checkpoints=keep, steps=steps)

    def warn(self, message: str) -> None:
        name = getattr(self.fun, "__qualname__", None) or repr(self.fun)
        warnings.warn(f"remat_opt: {name}: {message}", RematWarning, stacklevel=callers_level())

    def differentiated(self, args: tuple, kwargs: dict) -> list[Differentiated]:
        """The function with its backward pass in all its forms, for those who ask about it."""
        jitted, dynamic, rest = self.static.split(args, kwargs)
        _, captured = self.capture(jitted, dynamic, rest)
        found = [] if captured.program.has_references else self.forms(captured.program, self.checked_target())
        if not found:
            raise ValueError(
                "expected a function with a derivative: floating point arguments and results, and no mutable references"
            )
        return found

    def decision(self, args: tuple, kwargs: dict) -> CheckpointDecision:
        return choose_form(self.differentiated(args, kwargs), self.settings)


def _as_it_is(program: Program, *leaves: Any) -> list[Any]:
    return evaluate(program, leaves, lambda _, result: result)


@functools.cache
def _warn_of_remat3_once() -> None:
    warnings.warn(
        "remat_opt: with jax_remat3, this version of JAX does not make recomputation wait for a cotangent, so "
        "compilers may run it early: results are right, little memory may be saved. Turn jax_remat3 off, or install "
        "jax 0.12 or newer",
        RematWarning,
        stacklevel=callers_level(),
    )


def _warn_of_remat3() -> None:
    if compat.uses_remat3() and not compat.remat3_pins_cotangents():
        _warn_of_remat3_once()
