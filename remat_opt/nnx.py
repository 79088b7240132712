"""Flax nnx: `remat_opt.nnx.remat` in place of `flax.nnx.remat`.

    import remat_opt

    @remat_opt.nnx.remat
    def loss_fn(model, images, labels): ...

It is for a loss or a whole network, which it divides itself, or for a layer of many. Needs the extra `flax`,
which is imported when `remat_opt.nnx` is first used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from remat_opt.checkpoint_policy import check_policy
from remat_opt.checkpointing import checkpoint
from remat_opt.plan import Plan
from remat_opt.targets import Target

_NOT_GIVEN: Any = object()
_CONTEXT = "remat_opt"


def remat(
    f: Any = _NOT_GIVEN,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., Any] | None = None,
    graph: bool | None = None,
    graph_updates: bool | None = None,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    solver: str = "auto",
    plan: Plan | None = None,
    static_argnames: str | Sequence[str] = (),
    keep_user_names: bool = False,
) -> Any:
    """A function of nnx modules that recomputes what its backward pass needs, in place of `flax.nnx.remat`.

    Modules, optimizers, metrics and `nnx.Rngs` among the arguments are updated as with `nnx.remat`, and nodes may be
    shared between them. The function finds its own policy.

    Args:
        f: a function, or a method that is not bound. Without it, a decorator with these options.
        prevent_cse: as for `nnx.remat`: False leaves out the barriers round recomputation.
        static_argnums: positions of arguments that are not arrays and decide what is traced.
        policy: as for `nnx.remat`, which the result then is: nothing is searched.
        graph: as for `nnx.remat` where a policy is given. Else arguments are lifted as graphs, trees, too.
        graph_updates: the same.
        budget: as for `remat_opt.checkpoint`, for each call.
        target: the device to plan for.
        solver: name of the search.
        plan: a plan of the same call.
        static_argnames: the same as `static_argnums` for arguments given by name.
        keep_user_names: respect `nnx.remat`, `jax.checkpoint` and `checkpoint_name` inside; else they are replaced.

    Raises:
        ValueError: a bound method, `static_argnames` beside a policy, or what `remat_opt.checkpoint` refuses.
    """
    options: dict[str, Any] = {"budget": budget, "target": target, "solver": solver, "plan": plan}
    if policy is not None:
        check_policy(policy, **options)
        if static_argnames:
            raise ValueError("expected no static_argnames beside a policy, as for nnx.remat; write static_argnums=…")
        options = {"prevent_cse": prevent_cse, "static_argnums": static_argnums, "policy": policy}
        by_flax = functools.partial(nnx.remat, **options, graph=graph, graph_updates=graph_updates)
        return by_flax if f is _NOT_GIVEN else by_flax(f)
    if not isinstance(prevent_cse, bool):
        raise TypeError(f"expected prevent_cse to be True or False without a policy; got {prevent_cse!r}")
    recompute = checkpoint(**options, prevent_cse=prevent_cse, keep_user_names=keep_user_names)
    lift = functools.partial(_lift, recompute=recompute, numbers=static_argnums, names=static_argnames)
    if f is _NOT_GIVEN:
        return lift
    return lift(f)


def _lift(
    f: Callable[..., Any], recompute: Callable, numbers: int | Sequence[int], names: str | Sequence[str]
) -> Callable[..., Any]:
    if inspect.ismethod(f) and isinstance(f.__self__, nnx.Module):
        raise ValueError(
            "expected a function or a method that is not bound, got a bound one, whose module could not be updated; "
            f"write remat_opt.nnx.remat({type(f.__self__).__name__}.{f.__name__})(module, …)"
        )
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    static_names = {names} if isinstance(names, str) else set(names)
    signature = inspect.signature(f)
    positions = {name: at for at, name in enumerate(signature.parameters)}

    @functools.wraps(f)
    def recomputing(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)  # what has a position is passed by position
        static: dict[int | str, Any] = {}
        dynamic: dict[int | str, Any] = {}
        static_at = {number % len(bound.args) for number in numbers if -len(bound.args) <= number < len(bound.args)}
        static_at |= {positions[name] for name in static_names & positions.keys()}
        for at, value in enumerate(bound.args):
            (static if at in static_at else dynamic)[at] = value
        for name, value in bound.kwargs.items():
            (static if name in static_names else dynamic)[name] = value
        return _call(f, static, dynamic, recompute)

    return recomputing


def _call(
    f: Callable[..., Any], static: dict[int | str, Any], dynamic: dict[int | str, Any], recompute: Callable
) -> Any:
    """Call `f` on arguments by position and by name, as a function of arrays; what it updates is updated outside."""

    def pure(graph, state):
        with nnx.merge_context(_CONTEXT, inner=True) as context:
            given = context.merge(graph, state)
        every = {**static, **{_key(text): value for text, value in given.items()}}
        args = [every[at] for at in sorted(key for key in every if isinstance(key, int))]
        result = f(*args, **{name: value for name, value in every.items() if isinstance(name, str)})
        with nnx.split_context(_CONTEXT) as context:
            return context.split((given, result))

    pure.__name__ = getattr(f, "__name__", type(f).__name__)
    by_text = {f"{'at' if isinstance(key, int) else 'by'} {key}": _as_arrays(value) for key, value in dynamic.items()}
    with nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graph, state = context.split(by_text)
        graph, state = recompute(pure)(graph, state)
        with nnx.merge_context(_CONTEXT, inner=False) as context:
            _, result = context.merge(graph, state)
    return result


def _key(text: str) -> int | str:
    kind, _, key = text.partition(" ")
    return int(key) if kind == "at" else key


def _as_arrays(argument: Any) -> Any:
    """Python numbers as arrays: in a graph they would count as part of its structure."""
    is_node = lambda x: isinstance(x, (nnx.Pytree, nnx.Variable))  # noqa: E731
    to_array = lambda x: jnp.asarray(x) if isinstance(x, (bool, int, float, complex, np.generic)) else x  # noqa: E731
    return jax.tree.map(to_array, argument, is_leaf=is_node)
