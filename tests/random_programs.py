"""Random training steps, as source text: what fails can be read, run again and cut down by hand.

A program is a module that defines `step` and `arguments`. Its statements are drawn one after another; every statement
reads values that were made before and makes one of a known shape and dtype. Bodies of loops, branches, custom rules and
checkpoints are drawn the same way. Values stay near one, so that no infinity hides what comes after it.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from tests.random_arithmetic import ARITHMETIC
from tests.random_bodies import WITH_BODIES
from tests.random_functions import BOOL, FLOAT32, INT32, Body, Shared, Value, fill
from tests.random_indexing import INDEXING

ROWS = 48
SIZES = (8, 10, 10, 12, 12, 16, 16, 20, 30, 60)  # statements, of which each is one to ten operations

_HEAD = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def normal(seed, *shape, scale=0.5):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)
"""


@dataclasses.dataclass(frozen=True)
class RandomProgram:
    """A training step and its arguments.

    Attributes:
        source: Python that defines `step(params, state, batch)` and `arguments()`.
        donated: the positions of the arguments that may be overwritten.
    """

    source: str
    donated: tuple[int, ...]

    @functools.cached_property
    def _module(self) -> dict[str, Any]:
        module: dict[str, Any] = {}
        exec(compile(self.source, "<random program>", "exec"), module)
        return module

    @property
    def step(self) -> Callable:
        """The step, not jitted."""
        return self._module["step"]

    def arguments(self) -> tuple:
        """Fresh arguments, the same every time."""
        return self._module["arguments"]()

    def __repr__(self) -> str:
        return f"# donated: {self.donated}\n{self.source}"


@st.composite
def programs(draw: Callable, most_statements: int = max(SIZES)) -> RandomProgram:
    """Random programs of up to `most_statements` statements."""
    source = draw(st.randoms(use_true_random=False))
    return random_program(source, source.choice([size for size in SIZES if size <= most_statements]))


def random_program(source: random.Random, count: int) -> RandomProgram:
    """One program with a loss of `count` statements (those of nested bodies are among them)."""
    width, dtype = source.choice((4, 8)), source.choice((FLOAT32, FLOAT32, "bfloat16"))
    raw_key = source.random() < 0.3
    body = Body(source, width, Shared(count, [*ARITHMETIC, *INDEXING], WITH_BODIES))
    body.line("x, ids, mask, key = batch['x'], batch['ids'], batch['mask'], state['key']")
    body.add(Value("x", (ROWS, width), FLOAT32), Value("ids", (ROWS,), INT32), Value("mask", (ROWS,), BOOL))
    body.add(Value("state['count']", (), INT32), Value("key", (), "key"))
    if dtype != FLOAT32:
        body.new(f"x.astype(jnp.{dtype})", (ROWS, width), dtype)
    fill(body)
    form = source.choice(_FORMS)
    loss = f"def loss(params, state, batch):\n{textwrap.indent(body.text(_loss_of(body)), '    ')}\n"
    step = f"def step(params, state, batch):\n{textwrap.indent(form + _update(source, body), '    ')}\n"
    arguments = _arguments(body, width, "jax.random.PRNGKey(7)" if raw_key else "jax.random.key(7)")
    donated = source.choice(((), (0,), (0, 1)))
    return RandomProgram("\n\n".join((_HEAD, loss, step, arguments)), donated)


def _loss_of(body: Body) -> str:
    """The last lines of the loss: a number of some of the values, and a tree of others."""
    floats = [value for value in body.values if value.is_float and value.size]
    chosen = {value.name: value for value in (floats[-1], *(body.source.choice(floats) for _ in range(3)))}
    terms = [f"jnp.mean(jnp.square({name}.astype(jnp.float32)))" for name in chosen]
    read = [*dict.fromkeys(param.name for param in body.params)]
    terms += [f"1e-3 * jnp.sum({name})" for name in read if body.source.random() < 0.1]
    return f"return {' + '.join(terms)}, {_tree_of(body)}"


def _tree_of(body: Body) -> str:
    """Auxiliary results of all kinds: integers, booleans, keys, None, constants, arguments, nothing, the same twice."""
    leaves = ["None", "3", "True", "2.5", "np.int16(4)", "jnp.zeros((3,))", "jnp.arange(4)", "batch['x']"]
    leaves += ["x[:0]", "()"]
    leaves += [value.name for value in body.values] * 2
    chosen = [body.source.choice(leaves) for _ in range(body.source.randint(0, 5))]
    return f"[{', '.join((*chosen, *chosen[:1]))}]"


_FORMS = (
    "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)\n",
    "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)\n",
    "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)\n",
    """\
value, pull_back, aux = jax.vjp(lambda params: loss(params, state, batch), params, has_aux=True)
(grads,) = pull_back(jnp.ones_like(value) * 0.5)
""",
    """\
(value, aux), first = jax.value_and_grad(loss, has_aux=True)(params, state, batch)
moved = jax.tree.map(lambda p, g: p - 0.05 * jnp.tanh(g), params, first)
(value_after, _), grads = jax.value_and_grad(loss, has_aux=True)(moved, state, batch)
value = (value, value_after)
""",
    """\
def size_of_gradient(params):
    grads, aux = jax.grad(loss, has_aux=True)(params, state, batch)
    return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)), (grads, aux)
(value, (_, aux)), grads = jax.value_and_grad(size_of_gradient, has_aux=True)(params)
""",
    """\
def gradient(params):
    return jax.grad(loss, has_aux=True)(params, state, batch)
grads, along, aux = jax.jvp(gradient, (params,), (jax.tree.map(jnp.ones_like, params),), has_aux=True)
value = sum(jnp.sum(jnp.tanh(one)) for one in jax.tree.leaves(along))
""",
    """\
def micro_batch(total, part):
    (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, state, {**batch, 'x': batch['x'] * part})
    return jax.tree.map(jnp.add, total, grads), value
grads, value = lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, params), jnp.array([1.0, -0.5, 0.25]))
aux = value
""",
    """\
@functools.partial(jax.vmap, in_axes=(None, 0))
def each(params, scale):
    return jax.value_and_grad(loss, has_aux=True)(params, state, {**batch, 'x': batch['x'] * scale})
(value, aux), grads = each(params, jnp.array([1.0, -0.5]))
grads = jax.tree.map(lambda g: g.mean(0), grads)
""",
    "value, aux = jax.jit(loss)(params, state, batch)\ngrads = jax.tree.map(jnp.zeros_like, params)\n",
)


def _update(source: random.Random, body: Body) -> str:
    """The update and what the step returns: some arguments unchanged, some results twice, keys and counts renewed."""
    momentum = source.random() < 0.5
    gradient = source.choice(("g", "jnp.clip(g, -1, 1)", "jnp.tanh(g)"))
    lines = [f"grads = jax.tree.map(lambda g: {gradient}, grads)"]
    if source.random() < 0.2:
        lines.append("norm = jnp.sqrt(1e-3 + sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))")
        lines.append("grads = jax.tree.map(lambda g: g / norm, grads)")
    if momentum:
        lines.append("moments = jax.tree.map(lambda m, g: 0.9 * m + g, state['moments'], grads)")
        lines.append("params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)")
    else:
        lines.append("moments = state['moments']")
        lines.append("params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)")
    key = source.choice(("state['key']", "jax.random.split(state['key'])[0]", "jax.random.fold_in(state['key'], 1)"))
    more = source.choice(("", ", batch['ids']", ", value, None, 1.0", ", grads", ", state, jnp.zeros((0, 3))"))
    lines.append(f"state = {{'moments': moments, 'key': {key}, 'count': state['count'] + 1, 'none': None}}")
    lines.append(f"return params, state, value, aux{more}")
    return "\n".join(lines)


def _arguments(body: Body, width: int, key: str) -> str:
    params = ", ".join(f"{param.key!r}: {_param(param.shape, seed)}" for seed, param in enumerate(body.params))
    count = body.source.choice(("3", "jnp.int32(3)"))
    return f"""\
def arguments():
    params = {{{params or "'unused': normal(99, 3)"}}}
    moments = jax.tree.map(jnp.zeros_like, params)
    state = {{'moments': moments, 'key': {key}, 'count': {count}, 'none': None}}
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 6, {ROWS}), jnp.int32)
    batch = {{'x': normal(100, {ROWS}, {width}), 'ids': ids, 'mask': ids > 2, 'nothing': jnp.zeros((0, 2))}}
    return params, state, batch
"""


def _param(shape: Sequence[int], seed: int) -> str:
    return f"normal({', '.join(map(str, (seed, *shape)))})"
