"""The looped networks of `benchmarks.loops`: what the kept figures show, and two of them made again."""

import jax
import pytest

from benchmarks import loops
from benchmarks.refresh_readme import ROOT, loops_table
from benchmarks.results_file import load

KEPT = load(loops.FILE)


@pytest.mark.parametrize("network", ["lstm", "gru"])
def test_rows_come_out_as_they_are_kept(network: str) -> None:
    (row,) = [row for row in loops.ROWS if row.key == network]
    found, kept = loops.measure_row(row), KEPT[row.key]
    if kept["jax_version"] == jax.__version__:
        assert found["plain_bytes"] == pytest.approx(kept["plain_bytes"], rel=0.01)
        assert found["temp_bytes"] == pytest.approx(kept["temp_bytes"], rel=0.02)
    assert found["extra_flops"] == pytest.approx(kept["extra_flops"], abs=0.01)


def test_the_kept_rows_need_what_was_asked() -> None:
    assert set(KEPT) == {row.key for row in loops.ROWS}
    for row in loops.ROWS:
        found = KEPT[row.key]
        if row.asked_mb is not None:
            assert found["temp_bytes"] <= row.asked_mb * 1e6, row.key
        if row.asked_flops is not None:
            assert found["extra_flops"] <= row.asked_flops, row.key
        if row.budget is not None:
            assert found["temp_bytes"] <= row.budget * found["plain_bytes"], row.key


def test_layers_as_a_python_loop_and_as_a_scan_need_about_the_same() -> None:
    scanned, unrolled = KEPT["gpt"]["temp_bytes"], KEPT["gpt, Python loop"]["temp_bytes"]
    assert abs(scanned - unrolled) <= 0.15 * min(scanned, unrolled)


def test_four_times_the_steps_take_at_most_twice_the_memory() -> None:
    few, some, many = (KEPT[key]["temp_bytes"] for key in ("lstm, 256 steps", "lstm", "lstm, 4096 steps"))
    assert some <= 2 * few
    assert many <= 2 * some


def test_the_readme_shows_the_kept_rows() -> None:
    assert loops_table() in (ROOT / "README.md").read_text(encoding="utf-8")
