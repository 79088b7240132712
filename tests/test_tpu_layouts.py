"""What lies otherwise for a TPU's compiler and is copied, what loops spread, and what is on the chip at first."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from remat_opt.compilers import tpu
from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_groups import in_groups
from remat_opt.compilers.tpu_products import scores_behind_barriers
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_spread import with_spread_in_loops
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.compilers.tpu_turned import turned
from remat_opt.compilers.tpu_windows import with_windowed_maxima
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.images import images_of
from remat_opt.program.inline import Program, inline
from remat_opt.targets import measure_flat, reports_gaps_twice
from remat_opt.targets.devices import resolve_target

V5E = resolve_target("v5e")
RATES = Rates(V5E.bandwidth, V5E.flops)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def program_of(fun: Callable, *avals: jax.ShapeDtypeStruct) -> Program:
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def graph_of(fun: Callable, *avals: jax.ShapeDtypeStruct, donated: tuple[bool, ...] = ()) -> Graph:
    return compiled(program_of(fun, *avals), RATES, donated, platform="tpu")


def convolved(image: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def in_a_loop(turn: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (turn(carry), None), start, None, length=3)[0]


def made_orthogonal(weight: jax.Array, momentum: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    momentum = 0.9 * momentum + gradient
    update = momentum.T / 100.0
    for _ in range(2):
        update = 1.5 * update - 0.5 * (update @ update.T) @ update
    return weight - update.T, momentum


def spread_before(vector: jax.Array, start: jax.Array) -> jax.Array:
    spread = jnp.broadcast_to(vector[:, None], start.shape)
    return in_a_loop(lambda carry: jnp.tanh(carry) * carry.sum(1, keepdims=True) + spread, jnp.tanh(start)).sum()


@pytest.mark.parametrize(
    ("step", "avals", "donated"),
    [
        pytest.param(made_orthogonal, [array(2048, 64)] * 3, 2, id="a narrow matrix, which comes turned"),
        pytest.param(spread_before, [array(65536), array(65536, 1024)], 0, id="spread for a loop"),
    ],
)
def test_what_lies_otherwise_is_foreseen_as_it_is_compiled(step: Callable, avals: list, donated: int) -> None:
    program = program_of(step, *avals)
    graph = compiled(program, RATES, tuple(at < donated for at in range(len(avals))), platform="tpu")
    foreseen = allocated_by(graph, "tpu", gaps_twice=reports_gaps_twice("tpu"))
    figures = measure_flat(
        lambda *arrays: jax.tree.leaves(step(*arrays)), avals, donated=list(range(donated)), target="v5e"
    )
    assert foreseen == pytest.approx(figures.temp_bytes, rel=0.01, abs=2**16)


def test_what_is_given_of_a_turned_matrix_is_copied_and_what_is_returned_is_copied_back() -> None:
    def step(weight: jax.Array, momentum: jax.Array, gradient: jax.Array) -> tuple[jax.Array, ...]:
        return *made_orthogonal(weight, momentum, gradient), weight

    avals = [array(2048, 512)] * 3
    program = program_of(step, *avals)
    assert turned(program).intersection(program.inputs) == {0, 1, 2}
    assert [op.name for op in graph_of(step, *avals).ops].count("copy") == 5  # three given, two made


TALL, WIDE = array(1024, 512), array(512, 1024)


@pytest.mark.parametrize(
    ("step", "avals"),
    [
        pytest.param(lambda x, y, z: x - (y @ z).T, (WIDE, TALL, array(512, 512)), id="products make what is turned"),
        pytest.param(lambda x, y, z: x - (y @ z).T.T, (TALL, TALL, array(512, 512)), id="so they do"),
        pytest.param(lambda x, y, z: (2.0 * x + y).T + z, (TALL, TALL, WIDE), id="both sides are given"),
        pytest.param(lambda x, y: 2.0 * x.T @ y, (TALL, TALL), id="what is given is turned"),
        pytest.param(lambda x, y: (2.0 * x).T @ y, (TALL, TALL), id="a product reads it"),
        pytest.param(made_orthogonal, (array(2048, 64),) * 3, id="it comes turned"),
    ],
)
def test_other_transposes_turn_nothing(step: Callable, avals: tuple[jax.ShapeDtypeStruct, ...]) -> None:
    assert not turned(program_of(step, *avals))


def test_products_read_a_turned_matrix_as_it_is_given() -> None:
    def step(weight: jax.Array, momentum: jax.Array, image: jax.Array) -> tuple[jax.Array, ...]:
        result = image @ weight
        return *made_orthogonal(weight, momentum, image.T @ result), result

    graph = graph_of(step, array(2048, 512), array(2048, 512), array(64, 2048))
    first = next(op for op in graph.ops if op.kind is Kind.PRODUCT)
    assert {0, 2}.issuperset(first.inputs)
    assert [op.name for op in graph.ops].count("copy") == 4


IMAGE, KERNEL, SCALES = (32, 32, 32, 48), (3, 3, 48, 48), (32, 8)


def in_parts(image: jax.Array) -> jax.Array:
    return image.reshape(*image.shape[:-1], 8, image.shape[-1] // 8)


def scaled(parts: jax.Array, scale: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return (parts * scale[:, None, None, :, None]).reshape(shape)


def at_once(kernel: jax.Array, image: jax.Array, scale: jax.Array) -> jax.Array:
    made = convolved(image, kernel)
    return convolved(scaled(in_parts(made), scale, made.shape), kernel)


def for_a_loop(kernel: jax.Array, image: jax.Array, scale: jax.Array) -> jax.Array:
    made = convolved(image, kernel)
    parts = in_parts(made)
    return in_a_loop(lambda carry: convolved(scaled(parts, scale, made.shape) + carry, kernel), made)


def behind_a_barrier(kernel: jax.Array, image: jax.Array, scale: jax.Array) -> jax.Array:
    made = convolved(image, kernel)
    parts = lax.optimization_barrier(in_parts(made))
    return convolved(scaled(parts, scale, made.shape), kernel)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (at_once, ["conv_general_dilated", "conv_general_dilated"]),
        (for_a_loop, ["conv_general_dilated", "copy", "scan"]),
        (behind_a_barrier, ["conv_general_dilated", "copy", "mul", "reshape", "conv_general_dilated"]),
    ],
)
def test_features_in_groups_are_copied_for_loops_and_barriers(function: Callable, kernels: list[str]) -> None:
    avals = [array(*shape) for shape in (KERNEL, IMAGE, SCALES)]
    program = program_of(function, *avals)
    assert in_groups(program, images_of(program))
    found = [op.name for op in graph_of(function, *avals).ops]
    assert [name for name in found if name in kernels] == kernels


@pytest.mark.parametrize("shape", [(*IMAGE[:-1], 1, 48), (*IMAGE[:-1], 48, 1), (16, 64, 32, 8, 6)])
def test_other_shapes_are_no_groups(shape: tuple[int, ...]) -> None:
    program = program_of(
        lambda image, kernel: convolved(image, kernel).reshape(shape) * 2.0, array(*IMAGE), array(*KERNEL)
    )
    assert not in_groups(program, images_of(program))


def test_what_is_read_in_groups_behind_a_barrier_lies_so_for_a_loop() -> None:
    def function(kernel: jax.Array, image: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        made = convolved(image, kernel)
        parts = in_parts(made)
        first = in_a_loop(lambda carry: convolved(scaled(parts, scale, made.shape) + carry, kernel), made)
        held, first = lax.optimization_barrier((parts, first))
        return in_a_loop(lambda carry: convolved(scaled(held, scale, made.shape) + carry, kernel), first), held * 2.0

    avals = [array(*shape) for shape in (KERNEL, IMAGE, SCALES)]
    assert [op.name for op in graph_of(function, *avals).ops].count("copy") == 1
    program = program_of(function, *avals)
    reader = TpuReader(program, RATES, "tpu")
    reader.peak_of_body, reader.seconds_of_body = lambda *_: 0, lambda *_: 0.0
    reader.bodies = reader.tables = reader.images_of_bodies = {}
    sizes = in_tiles(reader, reader.read(())).sizes
    images = images_of(program)
    first, *_, last = sorted(in_groups(program, images))
    assert (sizes[first], sizes[last]) == (32**3 * 128 * 4, 32 * 32 * 128 * 48 * 4)  # features or columns in the lanes


def body_of(kernel: jax.Array, scale: jax.Array, parts: jax.Array, carry: jax.Array) -> jax.Array:
    return convolved(scaled(parts, scale, carry.shape) + carry, kernel)


def reading_twice(kernel: jax.Array, scale: jax.Array, parts: jax.Array, carry: jax.Array) -> jax.Array:
    return body_of(kernel, scale, parts, body_of(kernel, scale + 1.0, parts, carry))


def with_a_barrier(kernel: jax.Array, scale: jax.Array, parts: jax.Array, carry: jax.Array) -> jax.Array:
    parts, carry = lax.optimization_barrier((parts, body_of(kernel, scale, parts, carry)))
    return carry + scaled(parts, scale, carry.shape)


@pytest.mark.parametrize("body", [body_of, reading_twice, with_a_barrier])
def test_a_body_makes_an_image_of_what_it_is_given_in_groups(body: Callable) -> None:
    shapes = KERNEL, SCALES, (*IMAGE[:-1], 8, 6), IMAGE
    program = program_of(body, *(array(*shape) for shape in shapes))
    found = compiled(program, RATES, (False, False, False, True), platform="tpu", loop=(3, 1))
    assert [op.name for op in found.ops].count("copy") == 1


def test_a_loop_spreads_what_it_is_given_spread_unless_a_barrier_holds_that() -> None:
    def loop(vector: jax.Array, start: jax.Array, *, is_held: bool) -> tuple[jax.Array, jax.Array]:
        spread = jnp.broadcast_to(vector[:, None], start.shape)
        spread = lax.optimization_barrier(spread) if is_held else spread
        return in_a_loop(lambda carry: carry * spread, start), spread

    for is_held in (False, True):
        program = program_of(lambda *x, is_held=is_held: loop(*x, is_held=is_held), array(64), array(64, 512))
        (before,) = (one for one in program.equations if one.primitive.name == "scan")
        (after,) = (one for one in with_spread_in_loops(program).equations if one.primitive.name == "scan")
        assert [program.aval_of(x).shape for x in before.inputs] == [(64, 512), (64, 512)]
        assert program.aval_of(after.inputs[0]).shape == ((64, 512) if is_held else (64, 1))
        assert (after.params["jaxpr"] is before.params["jaxpr"]) == is_held


def test_what_loops_spread_is_spread_nowhere_else_unless_it_is_read() -> None:
    def loop(vector: jax.Array, start: jax.Array) -> jax.Array:
        spread = jnp.broadcast_to(vector[:, None], start.shape)
        return in_a_loop(lambda carry: carry * spread, start)

    def begun(vector: jax.Array, start: jax.Array) -> jax.Array:
        return in_a_loop(lambda carry: carry * start, jnp.broadcast_to(vector[:, None], start.shape))

    for function, kept in ((loop, False), (begun, True)):
        program = program_of(function, array(64), array(64, 512))
        found = with_spread_in_loops(program)
        shapes = [found.avals[e.outputs[0]].shape for e in found.equations if e.primitive.name == "broadcast_in_dim"]
        assert ((64, 512) in shapes) == kept
        assert (found is program) == kept


@pytest.mark.parametrize(("constant", "made", "is_inside"), [(100, 950, True), (600, 500, False)])
def test_of_a_body_what_it_is_given_comes_first_where_it_is_large(constant: int, made: int, is_inside: bool) -> None:
    ops = (Op((), (1,)), Op((0, 1), (2,)))
    graph = Graph((constant, made, 0), ops, inputs=(0,), outputs=(2,), fused=True)
    found = tpu.on_chip(graph, rates=RATES, capacity=1000, is_body=True)
    assert (found.sizes[1] == 0) == is_inside


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, most: jax.Array, *, is_reduced: bool, is_later: bool = True
) -> jax.Array:
    """Scores that are read at once, and behind a barrier once more, where their rows are reduced."""
    scores = jnp.einsum("bqc,bkc->bqk", query, key)
    first = jnp.einsum("bqk,bkc->bqc", jax.nn.softmax(scores) if is_reduced else jnp.exp(scores - most), value)
    again, first = lax.optimization_barrier((scores, first))
    later = jax.nn.softmax(again) if is_later else jnp.exp(again - most)
    return first + jnp.einsum("bqk,bkc->bqc", later, value)


@pytest.mark.parametrize(("is_reduced", "is_later"), [(False, True), (True, True), (False, False)])
def test_scores_that_a_barrier_holds_lie_by_rows_unless_rows_are_reduced_before(
    is_reduced: bool, is_later: bool
) -> None:
    avals = *[array(2, 96, 64)] * 3, array(2, 96, 1)
    program = program_of(lambda *x: attention(*x, is_reduced=is_reduced, is_later=is_later), *avals)
    (scores, *_) = (one.outputs[0] for one in program.equations if one.primitive.name == "dot_general")
    (barrier,) = (one for one in program.equations if one.primitive.name == "optimization_barrier")
    again = barrier.outputs[barrier.inputs.index(scores)]
    assert scores_behind_barriers(program) == ({scores, again} if is_later and not is_reduced else set())


def softmax_gradient(scores: jax.Array, gradient: jax.Array) -> jax.Array:
    exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
    total = exponentials.sum(-1, keepdims=True)
    weighed = (gradient * exponentials).sum(-1, keepdims=True)
    return (gradient / total - weighed / total**2) * exponentials


def of_words(logits: jax.Array, own: jax.Array) -> jax.Array:
    return jax.grad(lambda logits: -(jax.nn.log_softmax(logits) * own).sum(-1).mean())(logits)


@pytest.mark.parametrize(
    ("function", "shapes", "donated", "compiled_bytes"),
    [
        pytest.param(softmax_gradient, [(64, 512, 2048)] * 2, 0, 268_451_840, id="exponentials are stored"),
        pytest.param(softmax_gradient, [(768, 4, 96, 96)] * 2, 0, 113_278_976, id="sums are in their kernel"),
        pytest.param(of_words, [(8, 512, 8192)] * 2, 0, 134_234_112, id="a logarithm's"),
        pytest.param(made_orthogonal, [(16384, 2048)] * 3, 2, 402_653_184, id="a matrix that is turned"),
    ],
)
def test_what_is_allocated_is_what_libtpu_0_0_51_allocates(
    function: Callable, shapes: list[tuple[int, ...]], donated: int, compiled_bytes: int
) -> None:
    """The versions of libtpu that jax 0.10 to 0.12 bring do these otherwise; the model is of 0.0.51, as the kept
    tables are (docs/compilers.md, "libtpu before 0.0.51")."""
    arguments = [array(*shape) for shape in shapes]
    graph = graph_of(function, *arguments, donated=tuple(at < donated for at in range(len(arguments))))
    assert allocated_by(graph, "tpu") == pytest.approx(compiled_bytes, rel=0.002)


@pytest.mark.parametrize(
    ("function", "is_windowed"),
    [
        (lambda s, g: softmax_gradient(s, g), True),
        (lambda s, g: softmax_gradient(s, g) @ g, True),  # what a product reads is of two arrays
        (lambda s, g: jax.nn.softmax(s) @ g, False),
        (lambda s, g: (softmax_gradient(s, g), s.max(-1, keepdims=True)), False),  # once more to others
        (lambda s, g: (s.max(-1) * 2.0, g), False),
        (lambda s, g: s - s.max(1, keepdims=True), False),
        (lambda s, g: s - s.max(1)[..., None], False),
        (lambda s, g: s[..., :60] - s[..., :60].max(-1, keepdims=True), False),
        (lambda s, g: s - (most := s.max(-1))[..., None] + most.reshape(64, 8)[0, 0], False),
        (lambda s, g: s - jnp.maximum(s.max(-1, keepdims=True), 0.0), False),
        (lambda s, g: s - jnp.maximum(s.max(-1, keepdims=True), -jnp.inf), True),
        (lambda s, g: s - s.min(-1, keepdims=True), False),
    ],
)
def test_a_maximum_that_is_spread_again_is_windowed(function: Callable, is_windowed: bool) -> None:
    program = program_of(function, *[array(8, 64, 64)] * 2)
    found = with_windowed_maxima(program)
    assert (found is not program) == is_windowed
    windows = [one for one in found.equations if one.primitive.name == "reduce_window"]
    assert len(windows) == is_windowed
    for window in windows:
        assert found.avals[window.outputs[0]].shape == (8, 64, 64)
        assert window.params["window_dimensions"] == (1, 1, 64)


@pytest.mark.parametrize(
    ("function", "compiled_arrays"),
    [
        (lambda x, w, y: (jax.nn.log_softmax(x @ w) * y).sum(), 2),  # the shifted scores, and their exponentials
        (lambda x, w, y: (jnp.exp(scores := jax.nn.log_softmax(x @ w)) * scores).sum(), 2),
        (lambda x, w, y: (jax.nn.softmax(x @ w) * y).sum(), 1),
    ],
)
def test_a_sum_of_exponentials_whose_logarithm_is_spread_again_is_windowed(
    function: Callable, compiled_arrays: int
) -> None:
    """As libtpu 0.0.51 compiles it."""
    graph = graph_of(function, array(8, 256, 256), array(256, 8000), array(8, 256, 8000))
    scores = 4 * 8 * 256 * 8000
    assert allocated_by(graph, "tpu") == pytest.approx(compiled_arrays * scores, abs=0.01 * scores)
