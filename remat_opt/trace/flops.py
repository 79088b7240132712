"""FLOPs of equations."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as P

from remat_opt.trace import compat
from remat_opt.trace.images import POOLS
from remat_opt.trace.inline import Equation, Program, inline
from remat_opt.trace.pool_parts import BOTH, PLACES, SPREAD, Part
from remat_opt.trace.primitives import MOVES


@dataclasses.dataclass(frozen=True)
class FlopCount:
    """FLOPs of a whole step.

    Attributes:
        flops: loops count as often as they run.
        has_loops: there are loops or kernels, whose body XLA's own count has once.
        has_unknown_loops: there are loops of unknown length (`while_loop`); they are counted once.
    """

    flops: float
    has_loops: bool
    has_unknown_loops: bool


def note_of_loops(program: Program) -> str:
    """What a reader has to know of a program's FLOPs; empty if nothing."""
    return UNKNOWN_LOOPS if loops_in(program)[1] else ""


UNKNOWN_LOOPS = "loops of unknown length are counted once in FLOPs"


def count_flops(closed: Any, *, merges_checkpoints: bool = False) -> FlopCount:
    """Count the FLOPs of a traced step as it runs, original or rewritten.

    Args:
        closed: its jaxpr.
        merges_checkpoints: it is compiled by a compiler that merges what a `jax.checkpoint` recomputes with its first
            run (`compat.expands_barriers`).
    """
    program = inline(compat.without_dead_code(closed), merge_checkpoints=merges_checkpoints, keep_names=False)
    return FlopCount(sum(flops_of(one, program) for one in program.equations), *loops_in(program))


def loops_in(program: Program) -> tuple[bool, bool]:
    """Whether a program has loops or kernels, and whether it has loops of unknown length, anywhere inside."""
    inside = itertools.chain.from_iterable(compat.equations_in(one.params) for one in program.equations)
    found = [
        equation.primitive is P.while_p
        for equation in (*program.equations, *inside)
        if equation.primitive in (P.scan_p, P.while_p) or compat.is_kernel(equation.params)
    ]
    return bool(found), any(found)


def flops_of(equation: Equation, program: Program) -> float:
    """FLOPs of one equation: 2·m·n·k for products, loops times their length, one an element for the rest."""
    operands = [program.aval_of(x) for x in equation.inputs]
    results = [program.avals[x] for x in equation.outputs]
    return _flops(equation.primitive, equation.params, operands, results)


def _flops(primitive: Any, params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
    rule = _FLOP_RULES.get(primitive)
    if rule is not None:
        return rule(params, operands, results)
    if primitive in MOVES:
        return 0.0
    if compat.is_kernel(params):
        return compat.kernel_runs(params) * jaxpr_flops(params["jaxpr"])
    inner = compat.jaxprs_in(params)
    if inner:
        return float(sum(jaxpr_flops(jaxpr) for jaxpr in inner))
    return float(max((math.prod(getattr(aval, "shape", ())) for aval in (*operands, *results)), default=0))


def jaxpr_flops(jaxpr: Any) -> float:
    """FLOPs of a jaxpr when it runs once."""
    total = 0.0
    for equation in compat.bare_jaxpr(jaxpr).eqns:
        operands = [atom.aval for atom in equation.invars]
        results = [variable.aval for variable in equation.outvars]
        total += _flops(equation.primitive, equation.params, operands, results)
    return total


def devices_of(params: dict[str, Any]) -> int:
    """How many devices run the body of a `shard_map`, each on its part. FLOPs are those of all together, as are sizes
    and seconds of a step whose arrays are divided."""
    return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])


def _dot_flops(params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
    (contracted, _), _ = params["dimension_numbers"]
    return 2.0 * math.prod(results[0].shape) * math.prod(operands[0].shape[axis] for axis in contracted)


def _conv_flops(params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
    """Products with the zeros of padding and of dilation are not counted, as XLA does not count them."""
    image, kernel = operands[0].shape, operands[1].shape
    numbers = params["dimension_numbers"]
    image_axes, kernel_axes, result_axes = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
    positions = 1.0
    for axis, (i, k, o) in enumerate(zip(image_axes, kernel_axes, result_axes, strict=True)):
        positions *= _valid_positions(
            image[i],
            kernel[k],
            results[0].shape[o],
            params["window_strides"][axis],
            params["padding"][axis][0],
            params["lhs_dilation"][axis],
            params["rhs_dilation"][axis],
        )
    batch = results[0].shape[numbers.out_spec[0]]
    features = results[0].shape[numbers.out_spec[1]]
    return 2.0 * batch * features * kernel[numbers.rhs_spec[1]] * positions


def _valid_positions(image: int, kernel: int, result: int, stride: int, low: int, dilation: int, spread: int) -> int:
    """How many (result, kernel) index pairs along one axis meet an element of the undilated, unpadded image."""
    at = np.arange(result)[:, None] * stride + np.arange(kernel)[None, :] * spread - low
    inside = (at >= 0) & (at <= (image - 1) * dilation) & (at % dilation == 0)
    return int(inside.sum())


def _pool_flops(params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
    return float(math.prod(params["window_dimensions"]) * math.prod(results[0].shape))


def _scatter_flops(params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
    """As XLA expands it (`select_and_scatter_expander.cc`): each number of a window but the first is compared, asked
    whether it is the first (six operations), and selected with its index along every dimension; one sum for each."""
    window = math.prod(params["window_dimensions"])
    return float(math.prod(operands[0].shape) * ((7 + len(operands[0].shape)) * (window - 1) + 1))


def _part_flops(part: Part) -> Callable[[dict[str, Any], list[Any], list[Any]], float]:
    def flops(params: dict[str, Any], operands: list[Any], results: list[Any]) -> float:
        given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
        return jaxpr_flops(jax.make_jaxpr(functools.partial(part.bind, **params))(*given))

    return flops


_FLOP_RULES: dict[Any, Callable[[dict[str, Any], list[Any], list[Any]], float]] = {
    P.dot_general_p: _dot_flops,
    P.conv_general_dilated_p: _conv_flops,
    P.scan_p: lambda params, *_: params["length"] * jaxpr_flops(params["jaxpr"]),
    P.cond_p: lambda params, *_: max(map(jaxpr_flops, params["branches"])),
    compat.shard_map_p: lambda params, *_: devices_of(params) * jaxpr_flops(params["jaxpr"]),
    **dict.fromkeys(POOLS, _pool_flops),
    P.select_and_scatter_add_p: _scatter_flops,
    PLACES: _part_flops(PLACES),
    SPREAD: _part_flops(SPREAD),
    BOTH: _part_flops(BOTH),
}
