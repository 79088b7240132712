"""Budgets as users write them."""

from __future__ import annotations

import dataclasses
import numbers
import re
from fractions import Fraction

import numpy as np

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# ASCII: else the sign of the kelvin is a K, too. More digits than these are more bytes than there are.
_TEXT = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})\s*([KMGT]?I?)B\s*", re.IGNORECASE | re.ASCII)
MOST_BYTES = 2**63 - 1
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
    def has_limit(self) -> bool:
        """Whether the compiled step has to be checked against it."""
        return self.physical_bytes is not None or self.fraction is not None


def parse_budget(budget: int | float | str | None) -> Budget:
    """Read a budget as a user writes it.

    Args:
        budget: see `optimize`; NumPy's integers and floats, and fractions, are read as the numbers that they are.

    Raises:
        ValueError: a text or a number that is no budget.
        TypeError: it is no number and no text.
    """
    if budget is None:
        return Budget()
    if isinstance(budget, str):
        return _parse_text(budget)
    if not isinstance(budget, (numbers.Number, np.bool_)):
        raise TypeError(f"expected as budget {_EXPECTED}; got {_shown(budget)}")
    if isinstance(budget, (bool, np.bool_)) or not isinstance(budget, numbers.Real):
        raise ValueError(f"expected as budget {_EXPECTED}; got {_shown(budget)}")
    if isinstance(budget, numbers.Integral):
        return Budget(physical_bytes=_checked_bytes(int(budget), budget))
    if not 0.0 < budget <= 1.0:
        raise ValueError(
            f"expected a fraction in (0, 1], got {_shown(budget)}; for bytes write an int or text such as '12GB'; a "
            f"budget is {_EXPECTED}"
        )
    if not float(budget):
        raise ValueError(f"expected a fraction that a float can hold, got {_shown(budget)}; a budget is {_EXPECTED}")
    return Budget(fraction=float(budget))


def plain_budget(budget: int | float | str | None) -> int | float | str | None:
    """A budget that `parse_budget` accepts as Python's own number or text, as plans write it in files."""
    if budget is None or isinstance(budget, str):
        return None if budget is None else str(budget)
    return int(budget) if isinstance(budget, numbers.Integral) else float(budget)


def _parse_text(text: str) -> Budget:
    if text.strip().lower() == "min":
        return Budget(at_any_cost=True)
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a budget such as {_EXPECTED}; got {_shown(text)}")
    number = match[1].rstrip(".")  # Fraction reads no point at the end
    return Budget(physical_bytes=_checked_bytes(int(Fraction(number) * _UNITS[match[2].upper()]), text))


def _checked_bytes(count: int, budget: object) -> int:
    if not 0 < count <= MOST_BYTES:
        raise ValueError(
            f"expected a budget of at least 1 byte and less than 2**63, got {_shown(budget)}; write {_EXPECTED}"
        )
    return count


def _shown(budget: object) -> str:
    """A budget with its type, in a message; long numbers and texts are cut."""
    try:
        text = repr(budget)
    except ValueError:  # Python writes no integers of more than 4,300 digits
        text = "of too many digits"
    return f"{type(budget).__name__} {text if len(text) <= 60 else text[:60] + '…'}"
