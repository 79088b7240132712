"""Changes the jaxprs inside equations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_opt.trace import compat


def with_jaxprs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """An equation's parameters with a function of the open jaxprs among them; the same object where none changes.

    `change` gives a jaxpr of the same inputs and outputs, or the very same one. A kernel's jaxprs stay.
    """

    def changed(value: Any) -> Any:
        if not isinstance(value, (compat.Jaxpr, compat.ClosedJaxpr)):
            return value
        body = compat.bare_jaxpr(value)
        found = change(body)
        if found is body:
            return value
        return found if value is body else compat.ClosedJaxpr(found, compat.constants_of(value))

    if not compat.jaxprs_in(params):
        return params
    found = {
        name: tuple(map(changed, value)) if isinstance(value, tuple) else changed(value)
        for name, value in params.items()
    }
    pairs = zip(compat.jaxprs_in(params), compat.jaxprs_in(found), strict=True)
    return params if all(one is other for one, other in pairs) else found
