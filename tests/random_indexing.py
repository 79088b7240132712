"""Statements of random programs that move values: shapes, slices, indices; and integers, booleans, random keys."""

from __future__ import annotations

import math

from tests.random_functions import BOOL, FLOAT32, INT32, Body, Kind, broadcasts

# Shapes


def reshape(body: Body) -> None:
    if not (a := body.pick(lambda v: 0 not in v.shape)):
        return
    choices = [((1, *a.shape), f"{a.name}[None]"), ((*a.shape, 1), f"{a.name}[..., None]")] if len(a.shape) < 4 else []
    if len(a.shape) >= 2:
        last = (*a.shape[:-2], a.shape[-1], a.shape[-2])
        choices.append((last, f"jnp.swapaxes({a.name}, -1, -2)"))
        choices.append(((math.prod(a.shape[:2]), *a.shape[2:]), f"{a.name}.reshape(-1, *{a.shape[2:]})"))
        choices.append((a.shape[::-1], f"{a.name}.T"))
    for by in (2, 4):
        if a.shape and a.shape[0] % by == 0 and a.shape[0] > by and len(a.shape) < 4:
            shape = (by, a.shape[0] // by, *a.shape[1:])
            choices.append((shape, f"{a.name}.reshape{shape}"))
    if 1 in a.shape:
        axis = a.shape.index(1)
        choices.append(((*a.shape[:axis], *a.shape[axis + 1 :]), f"jnp.squeeze({a.name}, {axis})"))
    if choices:
        shape, expression = body.source.choice(choices)
        body.new(expression, shape, a.dtype)


def cut_and_join(body: Body) -> None:
    """Slices, pads, concatenations, stacks, repeats; an empty array now and then."""
    if not (a := body.pick(lambda v: len(v.shape) > 0 and v.size < 4000)):
        return
    n, rest = a.shape[0], a.shape[1:]
    half = n // 2
    choices = [
        ((half, *rest), f"{a.name}[:{half}]"),
        ((-(-n // 2), *rest), f"{a.name}[::2]"),
        ((0, *rest), f"{a.name}[:0]"),
    ]
    choices.append(((n + 2, *rest), f"jnp.pad({a.name}, ((1, 1), *[(0, 0)] * {len(rest)}))"))
    if same := body.pick(lambda v: len(v.shape) == len(a.shape) and v.shape[1:] == rest and v.dtype == a.dtype):
        if same.shape[0] + n <= 128:
            choices.append(((n + same.shape[0], *rest), f"jnp.concatenate([{a.name}, {same.name}])"))
        if same.shape == a.shape and len(a.shape) < 4:
            choices.append(((2, *a.shape), f"jnp.stack([{a.name}, {same.name}])"))
    if n and n <= 48:
        choices.append(((2 * n, *rest), f"jnp.repeat({a.name}, 2, axis=0)"))
        choices.append(((n, *rest), f"sum(jnp.split({a.name}, [1])[0:1]) + {a.name}"))
    shape, expression = body.source.choice(choices)
    body.new(expression, shape, a.dtype)


# Indexing


def gather(body: Body) -> None:
    """Rows by integers: gathered, scattered, looked up, in order and out of it."""
    i = body.pick(lambda v: len(v.shape) == 1 and v.size <= 128, INT32)
    a = body.pick(lambda v: len(v.shape) > 0 and 0 not in v.shape)
    if not i or not a:
        return
    n, count = a.shape[0], i.shape[0]
    at = f"{i.name} % {n}"
    rows = (count, *a.shape[1:])
    choices = [
        (rows, f"{a.name}[{at}]"),
        (rows, f"jnp.take({a.name}, {i.name}, axis=0, mode='clip')"),
        (a.shape, f"{a.name}.at[{at}].add(0.1)"),
        (a.shape, f"{a.name}.at[{at}].multiply(0.9)"),
        (a.shape, f"{a.name}.at[{at}].max({a.name}[{at}] * 0.5)"),
        (a.shape, f"{a.name}.at[jnp.arange({n}) // 2].add({a.name} * 0.5)"),
        (a.shape, f"jax.ops.segment_sum({a.name}, jnp.arange({n}) % 3, {n}) / {n}"),
    ]
    shape, expression = body.source.choice(choices)
    body.new(expression, shape, a.dtype)


def lookup(body: Body) -> None:
    if i := body.pick(lambda v: len(v.shape) <= 2 and v.size <= 128, INT32):
        table = body.param(6, body.width)
        body.new(f"{table}[{i.name} % 6]", (*i.shape, body.width), FLOAT32)


def one_hot(body: Body) -> None:
    if i := body.pick(lambda v: len(v.shape) <= 2 and v.size <= 128, INT32):
        body.new(f"jax.nn.one_hot({i.name} % {body.width}, {body.width})", (*i.shape, body.width), FLOAT32)


def dynamic_slice(body: Body) -> None:
    i, a = body.pick(lambda v: v.shape == (), INT32), body.pick(lambda v: len(v.shape) > 0 and v.shape[0] > 1)
    if i and a:
        size = body.source.choice((1, a.shape[0] // 2, a.shape[0] - 1))
        part = f"lax.dynamic_slice_in_dim({a.name}, {i.name} % 3, {size})"
        if body.source.random() < 0.5:
            body.new(part, (size, *a.shape[1:]), a.dtype)
        else:
            body.new(f"lax.dynamic_update_slice_in_dim({a.name}, 0.5 * {part}, {i.name} % 2, 0)", a.shape, a.dtype)


# Integers, booleans, keys


def integers(body: Body) -> None:
    choices = [((5,), INT32, "jnp.arange(5)")]
    if a := body.pick(lambda v: len(v.shape) > 0 and 0 not in v.shape):
        axis = body.source.randrange(len(a.shape))
        choices.append(((*a.shape[:axis], *a.shape[axis + 1 :]), INT32, f"jnp.argmax({a.name}, {axis})"))
        choices.append((a.shape, INT32, f"jnp.argsort({a.name}, {axis})"))
        choices.append((a.shape, BOOL, f"{a.name} > 0.1"))
        choices.append(((), BOOL, f"jnp.mean({a.name}) > 0"))
    if i := body.pick(dtype=INT32):
        choices += [(i.shape, INT32, f"{i.name} * 3 % 7"), (i.shape, INT32, f"({i.name} & 5) ^ 1")]
        choices += [((), INT32, f"{i.name}.sum()"), (i.shape, BOOL, f"{i.name} % 2 == 0")]
    if b := body.pick(dtype=BOOL):
        choices += [(b.shape, INT32, f"{b.name}.astype(jnp.int32)"), (b.shape, BOOL, f"~{b.name}")]
        choices += [((), BOOL, f"jnp.any({b.name})"), ((), INT32, f"jnp.sum({b.name})")]
    shape, dtype, expression = body.source.choice(choices)
    body.new(expression, shape, dtype)


def masked(body: Body) -> None:
    if (b := body.pick(dtype=BOOL)) and (a := body.pick(lambda v: broadcasts(b.shape, v.shape))):
        body.new(f"jnp.where({b.name}, {a.name}, 0.5 * {a.name})", a.shape, a.dtype)


def split_key(body: Body) -> None:
    if key := body.pick(dtype="key"):
        expression = body.source.choice(
            ("jax.random.split({k})[1]", "jax.random.fold_in({k}, 3)", "jax.random.split({k}, 3)[0]")
        )
        body.new(expression.format(k=key.name), (), "key")


def noise(body: Body) -> None:
    """Dropout and other random numbers."""
    key, a = body.pick(dtype="key"), body.pick(lambda v: v.size > 0)
    if not key or not a:
        return
    k, s = key.name, a.shape
    choices = [
        (FLOAT32, s, f"jax.random.normal({k}, {s}) * 0.5"),
        (a.dtype, s, f"{a.name} + jax.random.uniform({k}, {s}, jnp.{a.dtype})"),
        (a.dtype, s, f"jnp.where(jax.random.bernoulli({k}, 0.8, {s}), {a.name} / 0.8, 0)"),
        (a.dtype, s, f"jnp.where(jax.random.bernoulli({k}, 0.5, {s}), {a.name}, 0)"),
        (INT32, (4,), f"jax.random.randint({k}, (4,), 0, 9)"),
        (a.dtype, s, f"jax.random.permutation({k}, {a.name})" if s else f"{a.name} * 1"),
    ]
    dtype, shape, expression = body.source.choice(choices)
    body.new(expression, shape, dtype)


INDEXING: list[Kind] = [
    (reshape, 2), (cut_and_join, 1.5), (gather, 1), (lookup, 0.7), (one_hot, 0.4), (dynamic_slice, 0.6), (integers, 1),
    (masked, 0.6), (split_key, 0.7), (noise, 1),
]  # fmt: skip
