"""What a saved plan is recognised by."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remat_opt.rewrites.captured import capture
from remat_opt.trace.fingerprint import fingerprint


def test_a_fingerprint_does_not_depend_on_the_order_of_sets() -> None:
    program = capture(jax.jit(lambda x: jnp.sin(x)), (jnp.ones(4),), {}).program
    names = [f"axis{i}" for i in range(50)]

    def with_parameter(value: Any) -> str:
        equation = dataclasses.replace(program.equations[0], params={"axes": value})
        return fingerprint(dataclasses.replace(program, equations=(equation,)))

    @dataclasses.dataclass
    class Policy:
        names: frozenset[str]

        def __call__(self, name: str) -> bool:
            return name in self.names

    for kind in (set, frozenset, dict.fromkeys, lambda names: ({"x": set(names)},), lambda x: Policy(frozenset(x))):
        assert with_parameter(kind(names)) == with_parameter(kind(names[::-1]))
        assert with_parameter(kind(names)) != with_parameter(kind(names[1:]))
