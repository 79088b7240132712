"""Budgets as users write them."""

from __future__ import annotations

import dataclasses
import numbers
import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMGT]?I?)B\s*", re.IGNORECASE)
_EXPECTED = (
    'None (least memory), "min", a number of bytes as an int or as text such as "12GiB" or "800MB", or a fraction in '
    "(0, 1] of the plain step's temporary memory as a float"
)


class InfeasibleBudget(ValueError):
    """No schedule that was found keeps the budget. `least_bytes` is the least that could be done, as the budget counts
    (for a fraction: temporary memory; else the physical peak)."""

    def __init__(self, message: str, least_bytes: int):
        super().__init__(message)
        self.least_bytes = least_bytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget that was understood.

    Attributes:
        physical_bytes: bound of the device's physical peak: temporary + arguments + outputs − aliased.
        fraction: bound of the temporary memory, as a fraction of the plain step's.
        at_any_cost: least memory, whatever time it takes.
    """

    physical_bytes: int | None = None
    fraction: float | None = None
    at_any_cost: bool = False

    @property
    def is_promise(self) -> bool:
        """Whether the compiled step has to be checked against it."""
        return self.physical_bytes is not None or self.fraction is not None


def parse_budget(budget: int | float | str | None) -> Budget:
    """Read a budget as a user writes it.

    Raises:
        ValueError: it cannot be read, or is out of range.
        TypeError: it is no number and no text.
    """
    if budget is None:
        return Budget()
    if isinstance(budget, str):
        return _parse_text(budget)
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(f"expected as budget {_EXPECTED}; got {type(budget).__name__} {budget!r}")
    if isinstance(budget, numbers.Integral):
        budget = int(budget)
        if budget <= 0:
            raise ValueError(f"expected a budget of at least 1 byte, got {budget}; write {_EXPECTED}")
        return Budget(physical_bytes=budget)
    if not 0.0 < budget <= 1.0:
        raise ValueError(
            f"expected a fraction in (0, 1], got {budget}; for bytes write an int or text such as '12GB'; a budget is "
            f"{_EXPECTED}"
        )
    return Budget(fraction=float(budget))


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "min":
        return Budget(at_any_cost=True)
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a budget such as {_EXPECTED}; got {text!r}")
    bytes_ = int(float(match[1]) * _UNITS[match[2].upper()])
    if bytes_ <= 0:
        raise ValueError(f"expected a budget of at least 1 byte, got {text!r}; write {_EXPECTED}")
    return Budget(physical_bytes=bytes_)
