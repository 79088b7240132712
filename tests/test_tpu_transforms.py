"""Fourier transforms on a TPU: the products that they are, and transposes between them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.compilers.model import allocated_by, compiled
from remat_opt.compilers.tpu_fusion import with_results_computed
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_transforms import lying_as_transforms, places_of_spectra
from remat_opt.compilers.tpu_transposes import with_transposes_undone
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.program.inline import Program, inline
from remat_opt.targets import reports_gaps_twice
from remat_opt.targets.compile import measure_flat
from remat_opt.targets.devices import resolve_target


def program_of(fun: Callable, *shapes: tuple[int, ...]) -> Program:
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return inline(jax.make_jaxpr(fun)(*avals), with_barriers=True, keep_names=False)


def products_of(fun: Callable, *shapes: tuple[int, ...]) -> int:
    program = program_of(fun, *shapes)
    reader = TpuReader(program, Rates(1e12, {"float32": 1e14}), "tpu", lambda *_: 0)
    return sum(op.kind is Kind.PRODUCT for op in reader.read(()).ops)


@pytest.mark.parametrize(
    ("fun", "shape", "products"),
    [
        (jnp.fft.rfft, (64, 256), 2),  # real numbers to real and imaginary parts
        (jnp.fft.rfft, (64, 1024), 2 + 3),  # 8 × 128
        (jnp.fft.rfft2, (8, 64, 64), 2 + 3),
        (lambda x: jnp.fft.irfft(jnp.fft.rfft(x) * 2.0), (64, 128), 2 + 3),
        (lambda x: jnp.fft.irfft2(jnp.fft.rfft2(x) * 2.0), (8, 64, 512), 2 + 3 + 3 + 3 + 3 + 3),
    ],
)
def test_transforms_are_products(fun: Callable, shape: tuple[int, ...], products: int) -> None:
    assert products_of(fun, shape) == products


@pytest.mark.parametrize(("length", "rows"), [(128, 65), (256, 129), (2048, 2048)])
def test_long_transforms_make_all_frequencies(length: int, rows: int) -> None:
    """192 features lie in 256 lanes, as they come last behind the transform; the eight examples fill the sublanes."""
    program = program_of(lambda x: jnp.fft.rfft(x, axis=1) * 2.0, (8, length, 192))
    found = places_of_spectra(program)
    assert set(found.values()) == {8 * rows * 256}
    assert {program.avals[value].shape for value in found} == {
        (8, 192, length // 2 + 1),
        (8, length // 2 + 1, 192),
    }


def values_of(program: Program, arguments: list[np.ndarray]) -> list[np.ndarray]:
    values = dict(zip(program.inputs, arguments, strict=True)) | dict(program.constants)
    for equation in program.equations:
        given = [values[x] if isinstance(x, int) else x.value for x in equation.inputs]
        found = equation.primitive.bind(*given, **equation.params)
        made = found if equation.primitive.multiple_results else [found]
        values |= dict(zip(equation.outputs, made, strict=True))
    return [np.asarray(values[x]) for x in program.outputs if isinstance(x, int)]


def filtered(x: jax.Array) -> jax.Array:
    """As transforms take it, turned before and back behind."""
    turned = jnp.fft.irfft2(jnp.fft.rfft2(jnp.moveaxis(x, 3, 1)) * 0.5)
    return jnp.moveaxis(turned, 1, 3)


def two_layers(x: jax.Array, weight: jax.Array) -> jax.Array:
    total = filtered(x) + x @ weight
    wave = jnp.sin(total)
    return filtered(wave) + wave @ weight


def test_sums_are_made_twice_between_transforms() -> None:
    """Once turned, of what the first transform made and the turned product, and once as products read it."""
    program = program_of(two_layers, (2, 8, 6, 4), (4, 4))
    found = with_transposes_undone(program)
    names = [[one.primitive.name for one in each.equations] for each in (program, found)]
    assert [each.count("sin") for each in names] == [1, 2]
    assert [each.count("add") for each in names] == [2, 3]
    assert [each.count("transpose") for each in names] == [4, 4]
    second = [one for one in found.equations if one.primitive.name == "fft"][2]
    (wave,) = (one for one in found.equations if one.outputs == second.inputs)
    assert wave.primitive.name == "sin"
    assert found.avals[wave.outputs[0]].shape == (2, 4, 8, 6)

    random = np.random.default_rng(0)
    arguments = [random.standard_normal(program.avals[x].shape, np.float32) for x in program.inputs]
    for one, other in zip(values_of(program, arguments), values_of(found, arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, weight: jnp.moveaxis(jnp.sin(jnp.moveaxis(x @ weight, 3, 1) + 1.0), 1, 3) @ weight,  # at products
        lambda x, weight: jnp.cumsum(jnp.moveaxis(jnp.sin(filtered(x) + x @ weight), 3, 1), 2),  # for no transform
        lambda x, weight: (
            jnp.fft.rfft2(jnp.moveaxis(jnp.sin(jnp.moveaxis(jnp.cumsum(x, 1), 1, 3)), 3, 1)).real
        ),  # of none
        lambda x, weight: filtered(jnp.sin(x @ weight)),  # nothing to undo
        lambda x, weight: jnp.fft.rfft2(jnp.swapaxes(jnp.sin(filtered(x) + x @ weight), 1, 3)).real,  # another one
    ],
)
def test_other_transposes_stay(fun: Callable) -> None:
    program = program_of(fun, (2, 8, 8, 4), (4, 4))
    assert with_transposes_undone(program) is program


def test_what_two_transforms_need_is_turned_once() -> None:
    def residual(x: jax.Array, weight: jax.Array) -> jax.Array:
        first = jnp.sin(filtered(x) + x @ weight)
        second = jnp.cos(filtered(first) + first)
        return filtered(second) + first @ weight + second @ weight

    found = with_transposes_undone(program_of(residual, (2, 8, 6, 4), (4, 4)))
    names = [one.primitive.name for one in found.equations]
    assert (names.count("sin"), names.count("cos")) == (2, 2)


@pytest.mark.parametrize(("name", "stored"), [("sin", 3), ("transpose", 2)])
def test_a_product_that_is_read_turned_and_as_it_is_is_stored_as_it_is(name: str, stored: int) -> None:
    """What is added to it is added by those who read it, each in its layout; else the sum is stored."""
    ops = (
        Op((0, 1), (2,), kind=Kind.PRODUCT, name="dot_general"),
        Op((2,), (3,), kind=Kind.ELEMENTWISE, name="add"),
        Op((3,), (4,), kind=Kind.ELEMENTWISE, name=name),
        Op((3,), (5,), kind=Kind.ELEMENTWISE, name="cos"),
        Op((4,), (6,)),
        Op((5,), (7,)),
    )
    graph = Graph((8,) * 8, ops, inputs=(0, 1), outputs=(6, 7))
    assert with_results_computed(graph, [8] * 8).ops[0].outputs == (stored,)


def test_parts_are_copied_where_they_lie_otherwise() -> None:
    """16 features come last behind the transform, which has the frequencies in the lanes."""
    copies = []
    for axis in (1, 2):
        program = program_of(
            lambda x, axis=axis: jnp.fft.rfft(x, axis=axis) * 2.0, (8, 128, 16) if axis == 1 else (8, 16, 128)
        )
        reader = TpuReader(program, Rates(1e12, {"float32": 1e14}), "tpu", lambda *_: 0)
        ops = reader.read(()).ops
        copies.append(sum(op.name == "copy" for op in ops))
    assert copies == [2 + 1, 1]  # of real numbers' two parts, and what both are put together to


def test_what_lies_as_transforms_make_it() -> None:
    program = program_of(two_layers, (2, 8, 6, 4), (4, 4))
    found = lying_as_transforms(program)
    sines = [one.outputs[0] for one in program.equations if one.primitive.name == "sin"]
    products = [one.outputs[0] for one in program.equations if one.primitive.name == "dot_general"]
    assert found.issuperset(sines)
    assert found.isdisjoint(products)


def layers(x: jax.Array, *weights: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.nn.gelu(filtered(x) + x @ weight)
    return jnp.square(x).sum()


def test_transforms_are_foreseen() -> None:
    """As a v5e's compiler has it, which keeps both sums of each layer."""
    shapes = (64, 32, 32, 64), *[(64, 64)] * 4
    target = resolve_target("v5e")
    step = jax.grad(layers, argnums=(1, 2, 3, 4))
    graph = compiled(program_of(step, *shapes), Rates(target.bandwidth, target.flops), platform="tpu")
    foreseen = allocated_by(graph, "tpu", gaps_twice=reports_gaps_twice("tpu"))
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert foreseen == pytest.approx(measure_flat(step, avals, target="v5e").temp_bytes, rel=0.2)
