"""The public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from remat_opt.callable.frontier import Frontier, trace_frontier
from remat_opt.callable.function import OptimizedFunction
from remat_opt.callable.jit_options import check_names
from remat_opt.callable.largest_batch import LargestBatch, check_batch_settings, search_largest_batch
from remat_opt.callable.measure import Measurement, measure_step
from remat_opt.callable.resolving import bind, is_optimized, resolve
from remat_opt.planner.plan import Plan
from remat_opt.planner.settings import Settings, check_settings
from remat_opt.targets import Target, resolve_target
from remat_opt.trace import compat

_NOT_GIVEN: Any = object()


def optimize(
    fun: Any = _NOT_GIVEN,
    *,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    solver: str = "auto",
    plan: Plan | None = None,
    verify: bool = True,
    keep_user_checkpoints: bool = False,
    on_error: str = "raise",
    repeat_collectives: bool = False,
    split: bool | int | str = "auto",
    offload: bool = False,
    tune: bool | float = False,
    **jit_options: Any,
) -> Any:
    """Return a training step that needs a fraction of the memory and gives the same results.

    The whole step is traced, the tensors worth saving are searched for, and XLA recomputes everything else.

    Args:
        fun: a plain function, one of `jax.jit`, `nnx.jit` or `eqx.filter_jit`, whose options (donation, shardings, …)
            are kept, or a bound method or partial of one. Called with nnx or equinox modules a plain function is
            treated as by their jit; under `jax.jit` modules are pytrees. Without it, a decorator with these options.
        budget: None for the least memory with at most one extra forward pass; `"min"` for the least at any cost; bytes
            as an int or as text ("12GiB") for the least extra time whose *physical peak of one device* (temporary +
            arguments + outputs − aliased, as the compiler says) fits; a float in (0, 1] for a fraction of the compiled
            temporary memory of the original step.
        target: the device to plan for ("cpu", "h200", "h200:8", …); default: the attached backend.
        solver: name of the search.
        plan: a plan of the same program to use instead of searching.
        verify: compile to check budgets, and whether less is needed where that is open. False promises nothing.
        keep_user_checkpoints: leave the function's own `jax.checkpoint` regions; by default the search may do better.
        on_error: "raise", or "plain": run the original step, with a warning, where planning fails.
        repeat_collectives: let devices communicate again for what is recomputed (without `verify` they may anyway).
        split: how many equal parts of the batch run one after another, with results equal to rounding. "auto": as many
            as a budget on one device asks for and cannot be met without, or if 5 % of time are saved so. False: none.
        offload: let saved values go to the host's memory and back, beside the work or where a budget needs it.
        tune: run a few plans that fit at the first call and take the fastest; the seconds for that, True for 60.
        **jit_options: as of `jax.jit`, in place of those of a jitted `fun`. Positions count without bound arguments.
            What says how arguments are placed is given to `nnx.jit` or `eqx.filter_jit` itself.

    Returns:
        An `OptimizedFunction`, or an object that holds one: called like `fun`, has `lower`, `trace`, `eval_shape`,
        `plan`, `explain` and `jaxpr`.

    Raises:
        TypeError: `fun` is no function.
        ValueError: an option does not exist, or belongs elsewhere; at the first call, `split` or `tune` is impossible.
        InfeasibleBudget: the budget cannot be met; raised at the first call of a signature.
    """
    searched = {"budget": budget, "target": target, "solver": solver, "plan": plan, "verify": verify}
    allowed = {"keep_user_checkpoints": keep_user_checkpoints, "repeat_collectives": repeat_collectives}
    ways = {"split": split, "offload": offload, "tune": tune, "on_error": on_error}
    options: dict[str, Any] = {**searched, **allowed, **ways}
    settings = check_settings(**options)
    check_names(jit_options, optimize)
    if fun is _NOT_GIVEN:
        return functools.partial(optimize, **options, **jit_options)
    return _optimized(fun, settings, jit_options, "optimize")


def _optimized(fun: Any, settings: Settings, jit_options: dict[str, Any], name: str) -> Any:
    """See `optimize`; `name` is that of the public function, for errors."""

    def make(found: compat.JitDescription) -> OptimizedFunction:
        return OptimizedFunction(found.fun, settings, found.options, found.is_plain)

    return resolve(fun, jit_options, make, name, lifts_modules=True)


def frontier(
    fun: Callable,
    *args: Any,
    target: str | Target | None = None,
    solver: str = "auto",
    budgets: int = 12,
    split: bool | int | str = False,
    offload: bool = False,
    **kwargs: Any,
) -> Frontier:
    """What a step would cost at every amount of memory: the Pareto front of predicted peak and extra time.

    Args:
        fun: a step as for `optimize`.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        target: the device to plan for; default: the attached backend.
        solver: name of the search.
        budgets: how many budgets between the least and the plain peak to solve for. Used by solvers other than "auto",
            which knows its whole frontier.
        split: into how many chunks the batch is split, as for `optimize`. "auto": the best of several numbers, each of
            which is a search of its own.
        offload: whether saved values may go to the host's memory, as for `optimize`.
        **kwargs: keyword arguments of the step.

    Returns:
        A `Frontier`, from the least memory to the least time (usually the original step). Nothing is compiled. Pass a
        point's plan to `optimize(fun, plan=point.plan)`.
    """
    step = _optimized(fun, check_settings(target=target, solver=solver, split=split, offload=offload), {}, "frontier")
    return step.ask(functools.partial(trace_frontier, budgets=budgets), args, kwargs)


def largest_batch(
    train_step: Any,
    make_args: Callable[[int], tuple],
    budget: int | str | None = None,
    target: str | Target | None = None,
    multiple_of: int = 1,
    *,
    split: bool | int | str = False,
    repeat_collectives: bool = False,
    **jit_options: Any,
) -> LargestBatch:
    """Find the largest batch with which a step fits a budget, and the batch that is fastest for each sample.

    Batches are planned as `optimize(train_step, budget=budget)` plans them. The largest that is predicted to fit is
    confirmed by the compiler: at most four steps are compiled, at most two of which do not fit. Nothing runs. A sharded
    step whose plan would communicate more than the original step is planned again, which compiles more; where nothing
    else fits the plan's note says how many arrays are sent.

    Args:
        train_step: a step as for `optimize`.
        make_args: takes a number of rows, of all devices together, and returns the step's arguments as a tuple, arrays
            or `jax.ShapeDtypeStruct`s: the same trees for every batch, with other shapes.
        budget: bytes as an int or as text ("12GiB", "800MB") that the physical peak of one device may take; default:
            all of the target's memory.
        target: the device to plan for; default: the attached backend.
        multiple_of: batches are multiples of this number of rows.
        split: as for `optimize`. In chunks ("auto") mostly the batch's own arrays are what limits it.
        repeat_collectives: as for `optimize`.
        **jit_options: as of `jax.jit`, in place of those of a jitted `train_step`.

    Returns:
        A `LargestBatch`: the batch, its plan, the compiler's figures, and predicted samples per second of it, of the
        plain step's largest batch, and of the best batch in between. `print` it for a table.

    Raises:
        InfeasibleBudget: not even `multiple_of` rows fit; the message says what they and the state need.
        ValueError: the budget is not in bytes, the target does not exist, `multiple_of` is not positive, or what
            `make_args` returns does not change with the batch, or by more than its shapes.
        TypeError: `train_step` or `make_args` is no function, or `make_args` returns no tuple.
        TargetUnavailable: the target's compiler is not installed; the message names the extra.
    """
    options = {"split": split, "repeat_collectives": repeat_collectives}
    settings = check_batch_settings(make_args, budget, target, multiple_of, **options)
    check_names(jit_options, largest_batch)
    step = _optimized(train_step, settings, jit_options, "largest_batch")
    return search_largest_batch(step, settings, make_args, multiple_of)


def measure(fun: Any, *args: Any, target: str | Target | None = None, **kwargs: Any) -> Measurement:
    """Compile a step for a device, attached or absent, and read the compiler's figures. Nothing runs.

    Args:
        fun: a step as for `optimize`, or an optimised one, with its own budget and other options; it is compiled twice,
            unchanged and optimised.
        *args: its arguments, arrays or `jax.ShapeDtypeStruct`s.
        target: the device ("cpu", "h200", "v5e", …); default: the device an optimised step is planned for, else the
            attached backend. Figures for an absent GPU are without autotuning and its scratch memory.
        **kwargs: keyword arguments of the step.

    Returns:
        A `Measurement`: temporary memory, arguments, outputs, what is aliased, the physical peak, FLOPs (loops times
        their length), seconds of compiling, and state that is not donated. `print` it for a table.

    Raises:
        ValueError: the target does not exist; the message lists those that do.
        TargetUnavailable: the target's compiler is not installed; the message names the extra.
        ProgramNotPortable: the step cannot be exported to the target's compiler (host callbacks).
        CompilationFailed: the compiler refuses the step for a reason other than the device's memory.
    """
    resolved = None if target is None else resolve_target(target)
    fun = bind(fun)
    if not is_optimized(fun):
        fun = _optimized(fun, check_settings(target=resolved, solver="auto", verify=True), {}, "measure")
    return measure_step(fun, resolved, args, kwargs)
