"""Operations of JAX in NumPy, for comparing two programs op by op: nothing has to be compiled.

Only that one operation gives the same bits whenever it is given the same numbers is asked of these; in the last digits
they may differ from XLA's. What is not here is left to JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives as P

from remat_opt.trace import compat


def apply_in_numpy(equation: Any, arguments: Sequence[Any]) -> list[Any] | None:
    """The results of an equation; None where JAX has to be asked."""
    operation = _OPERATIONS.get(equation.primitive)
    results = [variable.aval for variable in equation.outvars]
    avals = [atom.aval for atom in equation.invars]
    if operation is None or any(_is_strange(aval) for aval in (*avals, *results)):
        return None
    operands = [np.asarray(value, aval.dtype) for value, aval in zip(arguments, avals, strict=True)]
    with np.errstate(all="ignore"):
        found = operation(equation.params, *operands)
    if found is None:
        return None
    found = found if isinstance(found, list) else [found]
    return [
        np.ascontiguousarray(value, aval.dtype).reshape(aval.shape) for value, aval in zip(found, results, strict=True)
    ]


def _is_strange(aval: Any) -> bool:
    """Keys have no numbers, and of nothing there is no maximum."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or 0 in aval.shape


def _broadcast(params: dict, x: np.ndarray, *_: Any) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _pad(params: dict, x: np.ndarray, filling: np.ndarray) -> np.ndarray | None:
    if any(low < 0 or high < 0 or inner for low, high, inner in params["padding_config"]):
        return None
    return np.pad(x, [(low, high) for low, high, _ in params["padding_config"]], constant_values=filling)


def _slice(params: dict, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _starts(x: np.ndarray, sizes: Sequence[int], starts: Sequence[np.ndarray]) -> tuple[slice, ...]:
    at = [min(max(int(s), 0), n - size) for s, n, size in zip(starts, x.shape, sizes, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


def _dynamic_slice(params: dict, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    return x[_starts(x, params["slice_sizes"], starts)]


def _dynamic_update_slice(params: dict, x: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    changed = x.copy()
    changed[_starts(x, update.shape, starts)] = update
    return changed


def _dot(params: dict, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Products in float32, one batch after another."""
    (x_sum, y_sum), (x_batch, y_batch) = params["dimension_numbers"]
    x_free = [axis for axis in range(x.ndim) if axis not in (*x_sum, *x_batch)]
    y_free = [axis for axis in range(y.ndim) if axis not in (*y_sum, *y_batch)]
    batch, inner = math.prod(x.shape[a] for a in x_batch), math.prod(x.shape[a] for a in x_sum)
    left = x.transpose(*x_batch, *x_free, *x_sum).reshape(batch, -1, inner).astype(np.float32)
    right = y.transpose(*y_batch, *y_sum, *y_free).reshape(batch, inner, -1).astype(np.float32)
    return np.matmul(left, right)


def _iota(params: dict) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    along = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return np.broadcast_to(along, shape)


def _select(params: dict, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.where(which, *cases[::-1]) if len(cases) == 2 else np.choose(which, cases)


def _float_only(operation: Callable) -> Callable:
    return lambda params, x, y: operation(x, y) if x.dtype.kind not in "iu" else None


def _along(operation: Callable) -> Callable:
    def cumulative(params: dict, x: np.ndarray) -> np.ndarray:
        axis = params["axis"]
        if not params["reverse"]:
            return operation(x, axis=axis)
        return np.flip(operation(np.flip(x, axis), axis=axis), axis)

    return cumulative


def _over_axes(operation: Callable) -> Callable:
    return lambda params, x: operation(x, axis=tuple(params["axes"]))


def _plain(operation: Callable) -> Callable:
    return lambda params, *operands: operation(*operands)


_UNARY = {
    "neg": np.negative, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "exp": np.exp, "exp2": np.exp2, "log": np.log,
    "log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "abs": np.abs, "sign": np.sign, "floor": np.floor,
    "ceil": np.ceil, "square": np.square, "cbrt": np.cbrt, "is_finite": np.isfinite, "round": np.round,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x), "not": np.invert, "copy": np.copy,
    "stop_gradient": np.copy, "convert_element_type": np.copy, "reshape": np.copy, "squeeze": np.copy, "name": np.copy,
}  # fmt: skip
_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "atan2": np.arctan2, "add_jaxvals": np.add,
}  # fmt: skip
_OTHERS = {
    "div": _float_only(np.divide), "pow": _float_only(np.power), "integer_pow": lambda p, x: x ** p["y"],
    "clamp": lambda p, low, x, high: np.minimum(np.maximum(x, low), high), "select_n": _select, "iota": _iota,
    "broadcast_in_dim": _broadcast, "transpose": lambda p, x: x.transpose(p["permutation"]), "pad": _pad,
    "concatenate": lambda p, *parts: np.concatenate(parts, p["dimension"]), "slice": _slice, "dot_general": _dot,
    "rev": lambda p, x: np.flip(x, p["dimensions"]), "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "reduce_sum": _over_axes(np.sum), "reduce_max": _over_axes(np.max),
    "reduce_min": _over_axes(np.min), "reduce_prod": _over_axes(np.prod), "reduce_or": _over_axes(np.any),
    "reduce_and": _over_axes(np.all), "argmax": lambda p, x: np.argmax(x, p["axes"][0]),
    "argmin": lambda p, x: np.argmin(x, p["axes"][0]), "cumsum": _along(np.cumsum), "cumprod": _along(np.cumprod),
    "cummax": _along(np.maximum.accumulate), "cummin": _along(np.minimum.accumulate),
}  # fmt: skip
_BY_NAME = {name: _plain(operation) for name, operation in (_UNARY | _BINARY).items()} | _OTHERS
_OPERATIONS: dict[Any, Callable] = {
    getattr(P, f"{name}_p"): operation for name, operation in _BY_NAME.items() if hasattr(P, f"{name}_p")
}
_OPERATIONS[compat.barrier_p] = lambda params, *operands: list(operands)
_OPERATIONS[compat.layout_constraint_p] = lambda params, x: x
