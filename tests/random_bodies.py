"""Statements of random programs that have bodies: loops, branches, rules of differentiation, checkpoints, calls."""

from __future__ import annotations

from tests.random_functions import BOOL, FLOAT32, INT32, Body, Kind, Value, function


def carry_of(body: Body) -> Value | None:
    """An array that a loop may carry: not too large, since loops are run turn by turn."""
    return body.pick(lambda v: len(v.shape) in (1, 2, 3) and 0 < v.size <= 800)


def inside(body: Body, value: Value, stem: str = "h") -> Value:
    """An input of an inner function that is like a value outside."""
    return Value(body.name(stem), value.shape, value.dtype)


def of_one(body: Body, h: Value, stem: str, *, closed: bool = False) -> str:
    """A function from a value like `h` to another one like it."""
    return function(body, stem, [inside(body, h)], h, closed=closed)


def scan_over_layers(body: Body) -> None:
    """A carry of an array, perhaps with a count and a key, over stacked weights; `ys` of any kind."""
    if not (h := carry_of(body)):
        return
    length, width = body.source.choice((1, 2, 3, 9)), h.shape[-1]  # 9: chunks of several kinds
    stacks = f"({body.param(length, width, width)}, {body.param(length, width)})"
    carried = [h]
    if body.source.random() < 0.3 and (key := body.pick(dtype="key")):
        carried.append(key)
    if body.source.random() < 0.3 and (count := body.pick(lambda v: v.shape == (), INT32)):
        carried.append(count)
    carry = [inside(body, value) for value in carried]
    weights = [Value(body.name("w"), (width, width), FLOAT32), Value(body.name("b"), (width,), FLOAT32)]
    layer = function(body, "layer", [*carry, *weights], h)
    turn, out, h_in = body.name("turn"), body.name(), carry[0].name
    renewed = {"key": "jax.random.split({})[0]", INT32: "{} + 1"}
    after = ", ".join(("h", *(renewed[value.dtype].format(value.name) for value in carry[1:])))
    w_in = weights[0].name
    ys = body.source.choice(("None", h_in, "h", "(h, None)", "h.mean()", f"({h_in}, h)", w_in, f"(h, {w_in})"))
    names, read = (", ".join(value.name for value in values) for values in (carry, weights))
    w, b = (f"{value.name}.astype(jnp.{h.dtype})" for value in weights)
    body.line(f"def {turn}(carry, weights):\n    ({names},), ({read}) = carry, weights")
    body.line(f"    h = jnp.tanh({layer}({names}, {read}) @ {w} + {b})\n    return ({after},), {ys}")
    options = body.source.choice(("", "", ", reverse=True", ", unroll=2", ", unroll=True"))
    wrap = body.source.choice(("{}", "{}", "jax.checkpoint({})")).format(turn)
    start = ", ".join(value.name for value in carried)
    body.line(f"({out}, *_), {out}_ys = lax.scan({wrap}, ({start},), {stacks}{options})")
    body.add(Value(out, h.shape, h.dtype))
    if ys in (h_in, "h"):
        body.add(Value(f"{out}_ys", (length, *h.shape), h.dtype))
    if ys == w_in:
        body.add(Value(f"{out}_ys", (length, width, width), FLOAT32))


def scan_over_time(body: Body) -> None:
    """Slices of an array, with weights that every turn reads."""
    if not (xs := body.pick(lambda v: len(v.shape) in (2, 3) and 1 < v.shape[0] <= 6 and 0 < v.size <= 800)):
        return
    one = Value("", xs.shape[1:], xs.dtype)
    cell = function(body, "cell", [inside(body, one), inside(body, one, "x")], one)
    turn, out = body.name("turn"), body.name()
    body.line(f"def {turn}(h, x):\n    after = (0.5 * {cell}(h, x) + 0.5 * x).astype(x.dtype)")
    body.line(f"    return after, {body.source.choice(('h', 'after', 'x * after'))}")
    options = body.source.choice(("", ", reverse=True", ", unroll=2"))
    body.line(f"{out}, {out}_ys = lax.scan({turn}, {xs.name}[0], {xs.name}{options})")
    body.add(Value(out, one.shape, one.dtype), Value(f"{out}_ys", xs.shape, xs.dtype))


def for_loop(body: Body) -> None:
    if h := carry_of(body):
        turn = function(body, "turn", [Value(body.name("i"), (), INT32), inside(body, h)], h)
        body.new(f"lax.fori_loop(0, {body.source.choice((1, 2, 3))}, {turn}, {h.name})", h.shape, h.dtype)


def while_loop(body: Body) -> None:
    """Without a derivative of its own, perhaps with one inside; how many turns there are depends on the data."""
    if h := carry_of(body):
        turn = of_one(body, h, "turn", closed=True)
        if body.source.random() < 0.5:
            inner, turn = turn, body.name("descent")
            body.line(f"def {turn}(h):\n    loss = lambda h: jnp.sum(jnp.tanh({inner}(h)).astype(jnp.float32))")
            body.line("    return (h - 0.1 * jax.grad(loss)(h)).astype(h.dtype)")
        going = "lambda c: (c[0] < 3) & (jnp.mean(c[1]) < 0.3)"
        start = f"(0, lax.stop_gradient({h.name}))"
        body.new(f"lax.while_loop({going}, lambda c: (c[0] + 1, {turn}(c[1])), {start})[1]", h.shape, h.dtype)


def branches(body: Body) -> None:
    if not (h := carry_of(body)):
        return
    flag, number = body.pick(lambda v: v.shape == (), BOOL), body.pick(lambda v: v.shape == (), INT32)
    if flag is not None and body.source.random() < 0.6:
        functions = [of_one(body, h, "branch") for _ in range(2)]
        body.new(f"lax.cond({flag.name}, {', '.join(functions)}, {h.name})", h.shape, h.dtype)
    elif number is not None:
        functions = [of_one(body, h, "branch") for _ in range(body.source.choice((2, 3)))]
        body.new(f"lax.switch({number.name} % 4, [{', '.join(functions)}], {h.name})", h.shape, h.dtype)


def custom_rule(body: Body) -> None:
    """A backward pass, or a tangent, of one's own."""
    if not (h := carry_of(body)):
        return
    inner, rule = of_one(body, h, "rule", closed=True), body.name("custom")
    if body.source.random() < 0.6:
        kept = body.source.choice(("(h, out)", "(jnp.sign(h),)", "(h, None)", "(out > 0,)"))
        body.line(f"{rule} = jax.custom_vjp({inner})")
        body.line(f"def {rule}_forward(h):\n    out = {inner}(h)\n    return out, {kept}")
        body.line(f"def {rule}_backward(kept, g):")
        body.line("    return ((0.5 * g + 0.1 * jnp.tanh(kept[0].astype(g.dtype))).astype(g.dtype),)")
        body.line(f"{rule}.defvjp({rule}_forward, {rule}_backward)")
    else:
        body.line(f"{rule} = jax.custom_jvp({inner})")
        body.line(f"@{rule}.defjvp\ndef {rule}_tangent(primals, tangents):")
        body.line(f"    return {rule}(*primals), 0.5 * tangents[0] * jnp.cos(primals[0])")
    body.new(f"{rule}({h.name})", h.shape, h.dtype)


_WRAPPERS = (
    "jax.checkpoint({f})({h})",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)({h})",
    "jax.checkpoint({f}, policy=jax.checkpoint_policies.save_only_these_names('mine'))({h})",
    "jax.checkpoint({f}, prevent_cse=False)({h})",
    "jax.jit({f})({h})",
    "jax.jit({f}, inline=True)({h})",
    "{f}({f}({h}))",
    "jax.vmap({f})(jnp.stack([{h}, 0.5 * {h}])).mean(0).astype({h}.dtype)",
    "lax.map({f}, jnp.stack([{h}, 0.5 * {h}]))[1]",
)
# Derivatives inside the forward pass; what is in the function may have only one of the two modes.
_DERIVATIVES = (
    "jax.grad(lambda h: jnp.sum(jnp.tanh({f}(h)).astype(jnp.float32)))({h})",
    "jax.vjp({f}, {h})[1](jnp.sin({h}))[0]",
)


def wrapped(body: Body) -> None:
    """A function under one of JAX's transforms: checkpoints, calls, batches, derivatives in the forward pass."""
    if h := carry_of(body):
        form = body.source.choice((*_WRAPPERS, *_DERIVATIVES))
        body.new(form.format(f=of_one(body, h, "fun"), h=h.name), h.shape, h.dtype)


WITH_BODIES: list[Kind] = [
    (scan_over_layers, 2), (scan_over_time, 1), (for_loop, 0.6), (while_loop, 0.4), (branches, 1), (custom_rule, 0.8),
    (wrapped, 2),
]  # fmt: skip
