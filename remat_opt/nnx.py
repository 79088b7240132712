"""Flax nnx: `remat_opt.nnx.remat` in place of `flax.nnx.remat`.

    import remat_opt

    @remat_opt.nnx.remat
    def loss_fn(model, images, labels): ...

It is for a loss or a whole network, which it divides itself, or for a layer of many. Needs the extra `flax`,
which is imported when `remat_opt.nnx` is first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from remat_opt.callable.checkpoint_policy import check_policy
from remat_opt.callable.checkpointing import checkpoint
from remat_opt.callable.resolving import resolve
from remat_opt.planner.plan import Plan
from remat_opt.targets import Target
from remat_opt.trace.compat import JitDescription

_NOT_GIVEN: Any = object()


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
    offload: bool = False,
) -> Any:
    """A function of nnx modules that recomputes what its backward pass needs, in place of `flax.nnx.remat`.

    Modules, optimizers, metrics and `nnx.Rngs` among the arguments are updated as with `nnx.remat`, and nodes may be
    shared between them. The function finds its own policy.

    Args:
        f: a function, or a method, bound or not. Without it, a decorator with these options.
        prevent_cse: as for `nnx.remat`: False leaves out the barriers round recomputation.
        static_argnums: positions of arguments that are not arrays and decide what is traced.
        policy: as for `nnx.remat`, which the result then is: nothing is searched.
        graph: as for `nnx.remat`: whether modules are taken as graphs or as trees.
        graph_updates: as for `nnx.remat`.
        budget: as for `remat_opt.checkpoint`, for each call.
        target: the device to plan for.
        solver: name of the search.
        plan: a plan of the same call.
        static_argnames: the same as `static_argnums` for arguments given by name.
        keep_user_names: respect `nnx.remat`, `jax.checkpoint` and `checkpoint_name` inside; else they are replaced.
        offload: as for `remat_opt.checkpoint`.

    Raises:
        ValueError: `static_argnames` beside a policy, or what `remat_opt.checkpoint` refuses.
    """
    options: dict[str, Any] = {"budget": budget, "target": target, "solver": solver, "plan": plan, "offload": offload}
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
    statics = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    modes = {"graph": graph, "graph_updates": graph_updates}
    lift = functools.partial(
        _lift,
        recompute=recompute,
        statics={name: value for name, value in statics.items() if value != ()},
        modes={name: value for name, value in modes.items() if value is not None},
    )
    return lift if f is _NOT_GIVEN else lift(f)


def _lift(f: Callable[..., Any], recompute: Callable, statics: dict[str, Any], modes: dict[str, bool]) -> Any:
    """`f` as `nnx.jit` calls it, under `recompute`: what it updates is updated outside."""

    def make(found: JitDescription) -> Any:
        jit = functools.partial(nnx.jit, **modes) if found.is_plain else jax.jit
        return recompute(jit(found.fun, **found.options))

    return resolve(f, statics, make, "nnx.remat", lifts_modules=True)
