"""A page of results as Markdown: what it shows, one table, and a last line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NETWORK = "network, batch, size"
_WORDS = frozenset({NETWORK, "network", "step", "target", "jax"})  # columns that hold no figures


def page(title: str, about: str, columns: Sequence[str], rows: Iterable[Sequence[str]], last: str = "") -> str:
    """The text of a page.

    Args:
        title: its heading.
        about: what is measured, how, and which command wrote it.
        columns: of the table; all but a few known ones hold figures, which stand to the right.
        rows: of the table, a text for each column.
        last: a line about all rows; empty for none.
    """
    rule = "|" + "|".join("---" if column in _WORDS else "---:" for column in columns) + "|"
    lines = [f"# {title}", "", about, "", _line(columns), rule, *map(_line, rows), *(("", last) if last else ())]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def megabytes(count: int) -> str:
    """A number of bytes in MB, three digits."""
    return f"{count / 1e6:.0f}" if count >= 1e8 else f"{count / 1e6:.3g}"
