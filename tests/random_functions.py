"""The functions of random programs while they are drawn: what they may read, and how a statement is added.

A kind of statement is a function of a `Body`: it reads values of that body and adds one to it. The kinds are in
`random_arithmetic.py`, `random_indexing.py` and `random_bodies.py`.
"""

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

    def __init__(self, count: int, without_bodies: Sequence[Kind], with_bodies: Sequence[Kind]):
        self.left = count
        self.without_bodies = without_bodies
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
        kinds = [*body.shared.without_bodies, *inner]
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


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of a shape can be broadcast to another one."""
    return len(shape) <= len(to) and all(one in (1, other) for one, other in zip(shape[::-1], to[::-1], strict=False))


Kind = tuple[Callable[[Body], None], float]
"""A kind of statement, and how often it is drawn."""
