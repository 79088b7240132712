"""The statements of random programs (`random_programs.py`): each kind reads values of a body and adds one to it."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

FLOAT32, BFLOAT16, INT32, BOOL = "float32", "bfloat16", "int32", "bool"
DEEPEST = 3


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable of the source; `dtype` is "key" for random keys, whose `shape` is without that of their data."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        return self.dtype in (FLOAT32, BFLOAT16)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> str:
        """Of a parameter, its key in the dictionary of parameters."""
        return self.name.split("'")[1]


class Shared:
    """What all bodies of a program share: the names, the parameters, and how many statements are still to come."""

    def __init__(self, count: int, with_bodies: Sequence[tuple[Callable[[Body], None], float]]):
        self.left = count
        self.with_bodies = with_bodies
        self.names = 0
        self.params: list[Value] = []


class Body:
    """Statements of a function, with the values that they may read; if `closed`, constants stand for parameters."""

    def __init__(self, source: random.Random, width: int, shared: Shared, depth: int = 0, closed: bool = False):
        self.source = source
        self.width = width
        self.shared = shared
        self.depth = depth
        self.closed = closed
        self.values: list[Value] = []
        self.lines: list[str] = []

    @property
    def params(self) -> list[Value]:
        return self.shared.params

    def line(self, text: str) -> None:
        self.lines += text.splitlines()

    def text(self, last: str) -> str:
        return "\n".join((*self.lines, last))

    def add(self, *values: Value) -> None:
        self.values += values

    def name(self, stem: str = "v") -> str:
        self.shared.names += 1
        return f"{stem}{self.shared.names}"

    def new(self, expression: str, shape: Sequence[int], dtype: str) -> Value:
        """Add `name = expression`."""
        value = Value(self.name(), tuple(shape), dtype)
        self.line(f"{value.name} = {expression}")
        self.add(value)
        return value

    def param(self, *shape: int) -> str:
        """A parameter of a shape, often one that is used elsewhere, too."""
        if self.closed:
            return f"normal({', '.join(map(str, (self.source.randrange(9), *shape)))})"
        same = [param for param in self.params if param.shape == shape]
        if same and self.source.random() < 0.3:
            return self.source.choice(same).name
        self.params.append(Value(f"params['p{len(self.params)}']", shape, FLOAT32))
        return self.params[-1].name

    def pick(self, wanted: Callable[[Value], bool] = lambda value: True, dtype: str | None = None) -> Value | None:
        """A value, more often a late one; floating point where no dtype is asked for."""
        found = [v for v in self.values if (v.dtype == dtype if dtype else v.is_float) and wanted(v)]
        if not found:
            return None
        late = self.source.random() < 0.7
        return self.source.choice(found[-4:] if late else found)


def fill(body: Body, count: int | None = None) -> None:
    """Add statements: `count`, or all that are left."""
    until = 0 if count is None else max(body.shared.left - count, 0)
    while body.shared.left > until:
        body.shared.left -= 1
        inner = body.shared.with_bodies if body.depth < DEEPEST and body.shared.left else ()
        kinds = [*_FLAT, *inner]
        kind = body.source.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        kind(body)


def function(body: Body, stem: str, inputs: Sequence[Value], result: Value, *, closed: bool = False) -> str:
    """Define a function of some inputs, whose result is like a value; its name. It may read what the body has already,
    unless it is `closed`."""
    inner = Body(body.source, body.width, body.shared, body.depth + 1, closed or body.closed)
    if not inner.closed and body.source.random() < 0.4:
        inner.add(body.source.choice(body.values))
    inner.add(*inputs)
    fill(inner, body.source.randint(1, 4))
    name = body.name(stem)
    body.line(f"def {name}({', '.join(value.name for value in inputs)}):")
    body.line("\n".join("    " + line for line in inner.lines))
    body.line(f"    return {like(inner, result)}")
    return name


def like(body: Body, wanted: Value) -> str:
    """An expression of a wanted shape and dtype, made of late values of a body."""
    same = [v for v in body.values if v.is_float and v.shape == wanted.shape]
    other = body.pick(lambda v: v.shape != wanted.shape and v.size > 0)
    terms = [same[-1].name] if same else [f"jnp.full({wanted.shape}, 0.1)"]
    if other is not None and body.source.random() < 0.6:
        terms.append(f"0.1 * jnp.mean({other.name})")
    return f"({' + '.join(terms)}).astype(jnp.{wanted.dtype})"


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
    if not (a := body.pick()) or not (b := body.pick(lambda v: _broadcasts(v.shape, a.shape))):
        return
    dtype = BFLOAT16 if a.dtype == b.dtype == BFLOAT16 else FLOAT32
    cast = f".astype(jnp.{dtype})"
    operands = {"a": a.name + cast, "b": f"jnp.broadcast_to({b.name}{cast}, {a.shape})"}
    body.new(body.source.choice(forms_in(_BINARY)).format(**operands), a.shape, dtype)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(one in (1, other) for one, other in zip(shape[::-1], to[::-1], strict=False))


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
    if (b := body.pick(dtype=BOOL)) and (a := body.pick(lambda v: _broadcasts(b.shape, v.shape))):
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


_FLAT: list[tuple[Callable[[Body], None], float]] = [
    (unary, 5), (binary, 4), (matmul, 5), (scaled_by_parameter, 1), (cast, 0.5), (attention, 0.5), (mixed_product, 0.3),
    (convolution, 1), (pooling, 1), (reduction, 1.5), (along, 2), (fourier, 0.4), (top, 0.4), (reshape, 2),
    (cut_and_join, 1.5), (gather, 1), (lookup, 0.7), (one_hot, 0.4), (dynamic_slice, 0.6), (integers, 1), (masked, 0.6),
    (split_key, 0.7), (noise, 1),
]  # fmt: skip
