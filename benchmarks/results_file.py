"""Results that are kept row by row, so that a run can be stopped and taken up again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import Row

RESULTS = Path(__file__).parent / "results"

Results = dict[str, dict[str, dict[str, Any]]]
"""For each row, by key, for each variant what `benchmarks.variants.measure_variant` gives, or its `error`."""


def file_of(table: str, target: str, folder: Path = RESULTS) -> Path:
    """Where a table's results for a target are kept."""
    return folder / f"{table}_{target}.json"


def load(file: Path) -> Results:
    """Results of earlier runs; empty if there are none."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


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
    order = {row.key: place for place, row in enumerate(rows)}
    results = dict(sorted(results.items(), key=lambda item: order.get(item[0], len(order))))
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, file)
    return results
