"""A user's policy under `remat_opt.checkpoint`: it is checked, and `jax.checkpoint` obeys it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from remat_opt.callable.static_arguments import statics_of
from remat_opt.planner.plan import Plan
from remat_opt.targets import Target
from remat_opt.trace.compat import JitDescription


class NamesPolicy(NamedTuple):
    """Which of a function's own names to save.

    Attributes:
        names: the names, sorted.
        policy: `jax.checkpoint_policies.save_only_these_names(*names)`, for `jax.checkpoint(fun, policy=policy)`.
    """

    names: tuple[str, ...]
    policy: Callable[..., Any]


class UnderPolicy:
    """A function under `jax.checkpoint` with the user's policy."""

    def __init__(self, found: JitDescription, policy: Callable[..., Any], prevent_cse: bool | tuple[Any, ...]):
        static = statics_of(found)
        self.fun = found.fun
        self.inner = static.fun
        self.policy = policy
        self.static_names = static.argnames
        self.recompute = functools.partial(
            jax.checkpoint, policy=policy, prevent_cse=prevent_cse, static_argnums=static.argnums
        )

    def __call__(self, *args, **kwargs) -> Any:
        static = {name: value for name, value in kwargs.items() if name in self.static_names}
        dynamic = {name: value for name, value in kwargs.items() if name not in static}
        return self.recompute(functools.partial(self.inner, **static) if static else self.inner)(*args, **dynamic)

    def plan(self, *args, **kwargs) -> Any:
        del args, kwargs
        raise ValueError(
            f"expected a function without a policy, got one with policy={self.policy!r}, which jax.checkpoint obeys: "
            "nothing is planned. Write jax.ad_checkpoint.print_saved_residuals(fun, *args) to see what is saved, or "
            "remat_opt.checkpoint(fun) without a policy for a plan"
        )

    explain = plan


def check_policy(
    policy: Any,
    *,
    budget: int | float | str | None = None,
    target: str | Target | None = None,
    solver: str = "auto",
    plan: Plan | None = None,
    offload: bool = False,
) -> None:
    """Raise where a policy is none, or stands beside options of the search that it takes the place of."""
    if policy is None:
        return
    if isinstance(policy, NamesPolicy):
        raise TypeError("expected a policy, got what remat_opt.policy returns; write policy=found.policy")
    if not callable(policy):
        raise TypeError(
            f"expected a policy of jax.checkpoint_policies or a function like them, got {policy!r}; write for example "
            "policy=jax.checkpoint_policies.dots_saveable"
        )
    options = {"budget": budget, "target": target, "solver": None if solver == "auto" else solver, "plan": plan}
    options["offload"] = offload or None
    given = [name for name, value in options.items() if value is not None]
    if given:
        beside = ", ".join(f"{name}=…" for name in given)
        raise ValueError(
            f"expected a policy or {beside}, got both: a policy says what is saved, and nothing is searched. Write "
            f"policy=… alone to have it obeyed, or {beside} without it to have one found"
        )


def check_as_jax(concrete: bool, prevent_cse: Any) -> None:
    """Raise for what `jax.checkpoint` does not take."""
    if concrete:
        raise NotImplementedError("expected concrete=False, as jax.checkpoint does; write static_argnums=… instead")
    if isinstance(prevent_cse, (str, bytes)) or not isinstance(prevent_cse, (bool, Sequence)):
        raise TypeError(
            f"expected prevent_cse to be a bool, or a sequence with one for each argument; got {prevent_cse!r}"
        )
