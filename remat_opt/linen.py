"""Flax linen: `remat_opt.linen.remat` in place of `flax.linen.remat`.

    import remat_opt

    Model = remat_opt.linen.remat(Model)

It is for a whole network, which it divides itself, or for a block of many, between which it keeps no more than
`nn.remat` would. Needs the extra `flax`, which is imported when `remat_opt.linen` is first used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax.core import lift
from flax.linen import transforms

from remat_opt.callable import checkpointing
from remat_opt.planner.plan import Plan
from remat_opt.targets import Target

Filter = Any
"""As flax means it: a name, names, True for all, or a `DenyList`."""


def remat(
    target_module: Any,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Callable[..., Any] | None = None,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    solver: str = "auto",
    plan: Plan | None = None,
    static_argnames: str | Sequence[str] = (),
    keep_user_names: bool = False,
    offload: bool = False,
) -> Any:
    """A module that recomputes what its backward pass needs, in place of `flax.linen.remat`; it finds the policy.

    State, random streams and names are as with `nn.remat`. While a module is initialised nothing is planned.

    Args:
        target_module: a module class, or a function of a module (as a decorator of methods).
        variables: the collections that are lifted, as for `nn.remat`.
        rngs: the random streams that are lifted.
        concrete: as for `nn.remat`, where True is an error.
        prevent_cse: as for `nn.remat`: False leaves out the barriers round recomputation.
        static_argnums: positions of arguments that are not arrays, `self` counted as 0.
        policy: as for `nn.remat`. It is obeyed, and nothing is searched.
        methods: names of the methods that are wrapped (default: `__call__`), or for each of them its options.
        budget: as for `remat_opt.checkpoint`, for each call of a method.
        target: the device to plan for.
        solver, plan: name of the search, or a plan of the same call.
        static_argnames: the same as `static_argnums` for arguments given by name.
        keep_user_names: respect `nn.remat`, `jax.checkpoint` and `checkpoint_name` inside; else they are replaced.
        offload: as for `remat_opt.checkpoint`.

    Raises:
        ValueError: what `remat_opt.checkpoint` refuses.
    """
    options = {
        "variables": variables,
        "rngs": rngs,
        "concrete": concrete,
        "prevent_cse": prevent_cse,
        "static_argnums": static_argnums,
        "policy": policy,
        "budget": budget,
        "target": target,
        "solver": solver,
        "plan": plan,
        "static_argnames": static_argnames,
        "keep_user_names": keep_user_names,
        "offload": offload,
    }
    if isinstance(methods, Mapping):
        methods = {name: {"how": _for_lifting({**options, **given})} for name, given in methods.items()}
        return transforms.lift_transform(checkpoint, target_module, methods=methods)
    return transforms.lift_transform(checkpoint, target_module, methods=methods, how=_for_lifting(options))


def _for_lifting(options: dict[str, Any]) -> dict[str, Any]:
    numbers = options["static_argnums"]
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    # `self` is not passed to the lifted function.
    static_argnums = tuple(number - 1 if number > 0 else number for number in numbers)
    lifted = {name: options.pop(name) for name in ("variables", "rngs")}
    del options["static_argnums"]
    return {**lifted, "static_argnums": static_argnums, "recompute": checkpointing.checkpoint(**options)}


def checkpoint(fn: Callable[..., Any], how: dict[str, Any]) -> Callable[..., Any]:
    """`remat_opt.checkpoint` for a function of a flax scope; its name is part of the wrapped classes' names."""

    def on_pure_values(scope_of: Callable, repack: Callable, variable_groups: Any, rng_groups: Any, *args, **kwargs):
        @functools.wraps(fn)
        def pure(variable_groups, rng_groups, *args, **kwargs):
            scope = scope_of(variable_groups, rng_groups)
            return fn(scope, *args, **kwargs), repack(scope)

        if _is_initialising(scope_of(variable_groups, rng_groups)):
            return pure(variable_groups, rng_groups, *args, **kwargs)
        behind = tuple(number + 2 if number >= 0 else number for number in how["static_argnums"])
        recomputing = how["recompute"](pure, static_argnums=behind)
        return recomputing(variable_groups, rng_groups, *args, **kwargs)

    variables, rngs = (how["variables"],), (how["rngs"],)
    return lift.pack(on_pure_values, variables, variables, rngs, name="remat", enable_kwargs=True)


def _is_initialising(scopes: Any) -> bool:
    return any(scope.is_mutable_collection("params") for scope in jax.tree.leaves(scopes))
