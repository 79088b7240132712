"""A fingerprint of a flat program: what a plan has to match.

It covers primitives, shapes, dtypes, edges and canonical parameters, and none of what changes between two runs of the
same program: no source lines, no addresses, no names, no JAX version.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import jax
import numpy as np

from remat_opt.trace import compat
from remat_opt.trace.inline import Constant, Program

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}")
_NAMES_ONLY = frozenset({"name", "debug_info", "jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd"})


def fingerprint(program: Program) -> str:
    """A hexadecimal SHA-256 of the program."""
    digest = hashlib.sha256()
    number: dict[int, int] = {}
    for value in (*program.inputs, *(value for value, _ in program.constants)):
        number[value] = len(number)
        digest.update(_aval(program.avals[value]).encode())
    for equation in program.equations:
        inputs = ",".join(_operand(x, number) for x in equation.inputs)
        digest.update(f"{equation.primitive.name}({inputs}){{{_params(equation.params)}}}".encode())
        for value in equation.outputs:
            number[value] = len(number)
            digest.update(_aval(program.avals[value]).encode())
    digest.update(",".join(_operand(x, number) for x in program.outputs).encode())
    return digest.hexdigest()


def _aval(aval: Any) -> str:
    return f"[{getattr(aval, 'dtype', type(aval).__name__)}{tuple(getattr(aval, 'shape', ()))}]"


def _operand(operand: int | Constant, number: dict[int, int]) -> str:
    if not isinstance(operand, Constant):
        return str(number[operand])
    return f"{_aval(operand.aval)}={_array(operand.value)}"


def _array(value: Any) -> str:
    if isinstance(value, compat.Tracer) or jax.dtypes.issubdtype(getattr(value, "dtype", None), jax.dtypes.extended):
        return "?"
    return hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]


def _params(params: dict[str, Any]) -> str:
    return ";".join(f"{name}={_param(value)}" for name, value in sorted(params.items()) if name not in _NAMES_ONLY)


def _param(value: Any) -> str:
    if hasattr(value, "eqns"):
        return f"<{_jaxpr(value)}>"
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_param, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{','.join(sorted(map(_param, value)))}}}"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{_param(k)}:{_param(v)}' for k, v in value.items()))}}}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{_array(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    if callable(value) and dataclasses.is_dataclass(value):  # a policy: its names are a set
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{_param(fields)}"
    return _ADDRESS.sub("", str(value))


def _jaxpr(jaxpr: Any) -> str:
    """The canonical text of an inner jaxpr, variables numbered as they appear."""
    jaxpr = compat.bare_jaxpr(jaxpr)
    number: dict[Any, int] = {}

    def read(atom: Any) -> str:
        if isinstance(atom, compat.Literal):
            return f"{_aval(atom.aval)}={_array(atom.val)}"
        return str(number.setdefault(atom, len(number)))

    lines = [",".join(read(variable) + _aval(variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars))]
    for equation in jaxpr.eqns:
        inputs = ",".join(map(read, equation.invars))
        outputs = ",".join(read(variable) + _aval(variable.aval) for variable in equation.outvars)
        lines.append(f"{outputs}={equation.primitive.name}({inputs}){{{_params(equation.params)}}}")
    lines.append(",".join(map(read, jaxpr.outvars)))
    return "|".join(lines)
