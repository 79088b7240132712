"""Statements of random programs that compute: elementwise, products, convolutions, reductions, along an axis."""

from __future__ import annotations

import math

from tests.random_functions import BFLOAT16, FLOAT32, INT32, Body, Kind, Value, broadcasts

# Elementwise

_UNARY = """\
jnp.tanh({a})|jnp.sin({a})|jnp.cos({a})|jax.nn.relu({a})|jax.nn.gelu({a})|jax.nn.silu({a})|jax.nn.softplus({a})
jax.nn.elu({a})|jax.nn.leaky_relu({a})|jax.nn.relu6({a})|jax.nn.sigmoid({a})|jnp.exp(-jnp.abs({a}))|-{a}|0.5 * {a}
jnp.log1p(jnp.abs({a}))|jnp.sqrt(jnp.square({a}) + 0.1)|lax.rsqrt(jnp.square({a}) + 1)|jnp.abs({a})|{a} + 1
jnp.sign({a}) * {a}|jnp.floor({a}) * 0.1|jnp.clip({a}, -1, 1)|lax.erf({a})|jnp.arctan({a})|lax.stop_gradient({a})
jnp.tanh({a}) ** 3|jnp.where({a} > 0.1, {a}, 0.5 * {a})|lax.optimization_barrier({a})|jnp.expm1(jnp.clip({a}, -1, 1))
lax.reduce_precision({a}, 8, 7)|jnp.round({a} * 4) / 4|jnp.sinc({a})|1 / (1 + jnp.square({a}))|jax.jit(jnp.sin)({a})
checkpoint_name({a}, 'mine')|jnp.abs({a} + 0.1) ** 1.5 / 4|jnp.nan_to_num({a})|jnp.cbrt({a} + 2)
jax.nn.log_sigmoid({a})|jax.checkpoint(jax.nn.gelu)({a})|jax.named_call(jnp.tanh, name='scope')({a})
"""
_BINARY = """\
{a} + {b}|{a} - {b}|jnp.tanh({a}) * {b}|0.5 * {a} * jnp.tanh({b})|jnp.maximum({a}, {b})|jnp.minimum({a}, {b})
jnp.where({a} > {b}, {a}, {b})|{a} / (1 + jnp.square({b}))|jnp.arctan2({a}, 1 + jnp.square({b}))|jnp.logaddexp({a}, {b})
jnp.where({b} > 0, jnp.sin({a}), jnp.cos({b}))|lax.select({a} > 0.2, {a}, {a}) + {b}|jnp.hypot({a} + 2, {b}) * 0.5
"""


def forms_in(text: str) -> list[str]:
    """What stands between bars and ends of lines."""
    return text.strip().replace("\n", "|").split("|")


def unary(body: Body) -> None:
    if a := body.pick():
        body.new(body.source.choice(forms_in(_UNARY)).format(a=a.name), a.shape, a.dtype)


def binary(body: Body) -> None:
    """Operands of one shape, or one broadcast to the other."""
    if not (a := body.pick()) or not (b := body.pick(lambda v: broadcasts(v.shape, a.shape))):
        return
    dtype = BFLOAT16 if a.dtype == b.dtype == BFLOAT16 else FLOAT32
    cast = f".astype(jnp.{dtype})"
    operands = {"a": a.name + cast, "b": f"jnp.broadcast_to({b.name}{cast}, {a.shape})"}
    body.new(body.source.choice(forms_in(_BINARY)).format(**operands), a.shape, dtype)


def cast(body: Body) -> None:
    if a := body.pick():
        dtype = body.source.choice((FLOAT32, BFLOAT16))
        body.new(f"{a.name}.astype(jnp.{dtype})", a.shape, dtype)


def scaled_by_parameter(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) > 0 and v.shape[-1] > 0):
        gain, shift = body.param(a.shape[-1]), body.param(a.shape[-1])
        body.new(f"({a.name} * (1 + {gain}) + {shift}).astype(jnp.{a.dtype})", a.shape, a.dtype)


# Products, convolutions


def matmul(body: Body) -> None:
    """The layer of a network."""
    if a := body.pick(lambda v: len(v.shape) >= 2 and 1 < v.shape[-1] <= 32):
        into = body.source.choice((body.width, a.shape[-1], 4, 8))
        weight = f"{body.param(a.shape[-1], into)}.astype(jnp.{a.dtype})"
        forms = ["{a} @ {w}", "jnp.einsum('...k,km->...m', {a}, {w})", "jnp.tanh({a} @ {w})", "jax.nn.relu({a} @ {w})"]
        body.new(body.source.choice(forms).format(a=a.name, w=weight), (*a.shape[:-1], into), a.dtype)


def attention(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) >= 2 and 0 < v.shape[-2] <= 64 and 0 < v.shape[-1] <= 32):
        scores = f"jnp.einsum('...ik,...jk->...ij', {a.name}, {a.name}) / {max(a.shape[-1], 1)}"
        body.new(f"jax.nn.softmax({scores}) @ {a.name}", a.shape, a.dtype)


def mixed_product(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) == 2 and 0 not in v.shape and v.shape[0] <= 64):
        expression = (
            f"lax.dot_general({a.name}, {a.name}, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)"
        )
        body.new(f"{expression} / {a.shape[0]}", (a.shape[1], a.shape[1]), FLOAT32)


def convolution(body: Body) -> None:
    """One or two dimensions, with strides, dilation and groups."""
    a = body.pick(lambda v: len(v.shape) == 2 and v.shape[0] % 4 == 0 and v.shape[0] >= 8 and v.shape[1] in (4, 8))
    if a is None:
        return
    channels = a.shape[1]
    if body.source.random() < 0.5:
        stride = body.source.choice((1, 2))
        kernel = f"{body.param(3, channels, channels)}.astype(jnp.{a.dtype})"
        more = body.source.choice(("", ", rhs_dilation=(2,)"))
        call = f"lax.conv_general_dilated({a.name}.reshape(2, -1, {channels}), {kernel}, ({stride},), 'SAME'{more}"
        body.new(
            f"{call}, dimension_numbers=('NWC', 'WIO', 'NWC'))", (2, -(-a.shape[0] // 2 // stride), channels), a.dtype
        )
        return
    depthwise = body.source.random() < 0.4
    kernel = body.param(2, 2, 1 if depthwise else channels, channels)
    groups = f", feature_group_count={channels}" if depthwise else ""
    image = f"{a.name}.reshape(1, 4, -1, {channels})"
    call = f"lax.conv_general_dilated({image}, {kernel}.astype(jnp.{a.dtype}), (1, 1), 'SAME'{groups}"
    body.new(f"{call}, dimension_numbers=('NHWC', 'HWIO', 'NHWC'))", (1, 4, a.shape[0] // 4, channels), a.dtype)


def pooling(body: Body) -> None:
    a = body.pick(lambda v: len(v.shape) in (3, 4) and 0 not in v.shape)
    if a is None:
        return
    window = (1, *(2 if size > 1 else 1 for size in a.shape[1:-1]), 1)
    shape = tuple(size // by for size, by in zip(a.shape, window, strict=True))
    if body.source.random() < 0.6:
        expression = (
            f"lax.reduce_window({a.name}, np.array(-np.inf, {a.name}.dtype), lax.max, {window}, {window}, 'VALID')"
        )
    else:
        zero = f"np.array(0, {a.name}.dtype)"
        expression = f"lax.reduce_window({a.name}, {zero}, lax.add, {window}, {window}, 'VALID') / {math.prod(window)}"
    body.new(expression, shape, a.dtype)


# Reductions and what goes along an axis

_REDUCTIONS = (
    "{a}.mean({i}, keepdims={k})",
    "{a}.max({i}, keepdims={k})",
    "{a}.min({i}, keepdims={k})",
    "{a}.sum({i}, keepdims={k}) / {n}",
    "jax.nn.logsumexp({a}, {i}, keepdims={k}) / 2",
    "{a}.var({i}, keepdims={k})",
    "jnp.sqrt({a}.var({i}, keepdims={k}) + 0.1)",
    "jnp.prod(1 + 0.05 * jnp.tanh({a}), {i}, keepdims={k})",
)
_ALONG = (
    "jnp.cumsum({a}, {i}) / {n}", "jax.nn.softmax({a}, {i})", "jax.nn.log_softmax({a}, {i}) / 4", "jnp.flip({a}, {i})",
    "jnp.sort({a}, {i})", "jnp.roll({a}, 1, {i})", "lax.cummax({a}, {i})", "lax.cumlogsumexp({a}, {i}) / 4",
    "lax.associative_scan(jnp.add, {a}, axis={i}) / {n}", "jax.nn.standardize({a}, {i}, epsilon=0.1) / 2",
    "jnp.take_along_axis({a}, jnp.argsort({a}, {i}), {i})",
    "lax.associative_scan(jnp.maximum, {a}, axis={i}, reverse=True)",
    "({a} - {a}.mean({i}, keepdims=True)) * lax.rsqrt({a}.var({i}, keepdims=True) + 0.1)",
    "jnp.concatenate([lax.slice_in_dim({a}, 1, None, axis={i}), lax.slice_in_dim({a}, 0, 1, axis={i})], {i})",
    "jnp.where(lax.broadcasted_iota(jnp.int32, {s}, {i}) % 2 == 0, {a}, 0.5)",
    "jnp.cumprod(1 + 0.05 * jnp.tanh({a}), {i})",
)  # fmt: skip


def reduction(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) > 0 and 0 not in v.shape):
        axis, keep = body.source.randrange(len(a.shape)), body.source.random() < 0.4
        shape = (*a.shape[:axis], *((1,) if keep else ()), *a.shape[axis + 1 :])
        form = body.source.choice(_REDUCTIONS)
        body.new(form.format(a=a.name, i=axis, k=keep, n=a.shape[axis]), shape, a.dtype)


def along(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) > 0 and 0 not in v.shape):
        axis = body.source.randrange(len(a.shape))
        expression = body.source.choice(_ALONG).format(a=a.name, i=axis, n=a.shape[axis], s=a.shape)
        body.new(f"({expression}).astype(jnp.{a.dtype})", a.shape, a.dtype)


def fourier(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) > 0 and v.shape[-1] > 1):
        there = f"jnp.fft.rfft({a.name}.astype(jnp.float32))"
        if body.source.random() < 0.5:
            body.new(f"jnp.abs({there} + 0.1) / 4", (*a.shape[:-1], a.shape[-1] // 2 + 1), FLOAT32)
        else:
            body.new(f"jnp.fft.irfft({there} * (0.5 + 0.5j), {a.shape[-1]})", a.shape, FLOAT32)


def top(body: Body) -> None:
    if a := body.pick(lambda v: len(v.shape) > 0 and v.shape[-1] >= 3):
        count = body.source.choice((1, 2, 3))
        values, indices = body.name(), body.name()
        body.line(f"{values}, {indices} = lax.top_k({a.name}, {count})")
        shape = (*a.shape[:-1], count)
        body.add(Value(values, shape, a.dtype), Value(indices, shape, INT32))


ARITHMETIC: list[Kind] = [
    (unary, 5), (binary, 4), (matmul, 5), (scaled_by_parameter, 1), (cast, 0.5), (attention, 0.5), (mixed_product, 0.3),
    (convolution, 1), (pooling, 1), (reduction, 1.5), (along, 2), (fourier, 0.4), (top, 0.4),
]  # fmt: skip
