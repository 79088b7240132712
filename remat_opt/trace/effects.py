"""What may not run twice though no effect says so: state that is not a program's, and what devices send each other."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from remat_opt.trace import compat


def is_stateful(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether a second run of an equation could differ from the first, or be noticed; inner jaxprs are read, too."""
    return _is_or_holds(compat.STATEFUL, primitive, params)


def communicates(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether an equation is an explicit collective, or has one in it."""
    return _is_or_holds(compat.COLLECTIVES, primitive, params)


def _is_or_holds(wanted: Set[Any], primitive: Any, params: dict[str, Any]) -> bool:
    return primitive in wanted or any(equation.primitive in wanted for equation in compat.equations_in(params))
