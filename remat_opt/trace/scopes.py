"""Name scopes of what is recomputed, which a compiler hands on to all that it makes of it."""

from __future__ import annotations

import re

_RECOMPUTED = re.compile(r"\brecomputed((?:_\d+)+)\b")


def recomputed_scope(path: str) -> str:
    """The name scope of what is recomputed: "recomputed_12_7" for the path "_12_7"."""
    return f"recomputed{path}"


def recomputed_in(names: str) -> list[tuple[int, ...]]:
    """The paths of all such scopes in the names that a compiled program has for its operations."""
    return [tuple(map(int, path.split("_")[1:])) for path in _RECOMPUTED.findall(names)]
