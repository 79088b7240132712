"""Results that are kept row by row, so that a run can be stopped and taken up again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Row

RESULTS = Path(__file__).parent / "results"

Results = dict[str, dict[str, dict[str, Any]]]
"""For each row, by key, for each variant what `benchmarks.variants.measure_variant` gives, or its `error`."""


def file_of(table: str, target: str, folder: Path = RESULTS) -> Path:
    """Where a table's results for a target are kept."""
    return folder / f"{table}_{target}.json"


def load(file: Path) -> dict[str, dict[str, Any]]:
    """Results of earlier runs; empty if there are none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def save(
    file: Path,
    results: Mapping[str, Any],
    keys: Iterable[str] | None = None,
    to_markdown: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """Write results, and a page of them beside the file.

    Args:
        file: `.json`; one that is there is replaced at once, so that a run may be stopped at any time.
        results: by key.
        keys: in the order that the file is to have; other results come last. None for the order that they are in.
        to_markdown: the page.

    Returns:
        The results in the order of the file.
    """
    order = {key: place for place, key in enumerate(results if keys is None else keys)}
    ordered = dict(sorted(results.items(), key=lambda item: order.get(item[0], len(order))))
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, file)
    if to_markdown is not None:
        file.with_suffix(".md").write_text(to_markdown(ordered), encoding="utf-8")
    return ordered


def keep(file: Path, rows: Sequence[Row], key: str, variant: str, result: dict[str, Any]) -> Results:
    """Add one result to a file, which is read again first: several runs may fill it.

    Args:
        file: of `file_of`.
        rows: of the table, whose order the file has.
        key: of the row.
        variant: its name.
        result: what was measured.
    """
    results = load(file)
    results.setdefault(key, {})[variant] = result
    return save(file, results, (row.key for row in rows))
