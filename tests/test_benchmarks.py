"""The benchmarks: small rows made again and compared with the kept ones, resuming, and what the tables say."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import gpu_row, loops, on_gpu, run, variants
from benchmarks.markdown import below_our_frontier, cut_of, to_markdown
from benchmarks.refresh_readme import FROM_RESULTS, REGIONS
from benchmarks.results_file import RESULTS, file_of, keep, load
from benchmarks.row import Request
from benchmarks.step_time import time_variants
from benchmarks.tables import FENG_HUANG, POLICIES, SMALL, TABLES, Row
from remat_opt.examples import EXAMPLES
from remat_opt.targets import resolve_target

KEPT = load(file_of("small", "cpu"))


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.network)
def test_small_rows_come_out_as_they_are_kept(row: Row, tmp_path: Path) -> None:
    wanted = ["plain", "nn.remat", "ours"]
    found = run.run_table("small", "cpu", [row], wanted, folder=tmp_path)[row.key]
    assert list(found) == wanted
    for variant in wanted:
        now, kept = found[variant], KEPT[row.key][variant]
        if kept["jax_version"] == jax.__version__:
            assert now["temp_bytes"] == pytest.approx(kept["temp_bytes"], rel=0.01), variant
            assert now["physical_peak_bytes"] == pytest.approx(kept["physical_peak_bytes"], rel=0.01), variant
        assert now["extra_flops"] == pytest.approx(kept["extra_flops"], abs=0.01), variant
    assert found["ours"]["temp_bytes"] < 0.8 * found["plain"]["temp_bytes"]
    assert found["ours"]["temp_bytes"] < 1.05 * found["nn.remat"]["temp_bytes"]
    # Taken up again, there is nothing left to do.
    told: list[str] = []
    run.run_table("small", "cpu", [row], wanted, folder=tmp_path, tell=lambda text, done: told.append(text))
    assert told == []
    assert "## Extra FLOPs" in file_of("small", "cpu", tmp_path).with_suffix(".md").read_text(encoding="utf-8")


def test_what_is_planned_as_it_was_is_predicted_and_not_measured_again(tmp_path: Path) -> None:
    row = SMALL[0]
    file = file_of("small", "cpu", tmp_path)
    planned, other = variants.measure_variant(row, "ours", "cpu", {}, 1e9), {"temp_bytes": 1, "compile_seconds": -1.0}
    kept = {**planned, "temp_bytes": 1, "compile_seconds": -1.0}
    keep(file, SMALL, row.key, "ours", kept)
    keep(file, SMALL, row.key, "plain", other)
    assert run.planned_of(row, load(file)) == ["ours"]
    plain_flops = variants.count_flops(variants.write(row, "plain", "cpu", {}))
    assert variants.predict_variant(row, "ours", "cpu", load(file)[row.key], 1e9) == kept
    assert variants.predict_variant(row, "ours", "cpu", load(file)[row.key], plain_flops) is None  # other FLOPs
    found = run.run_table("small", "cpu", [row], ["ours"], folder=tmp_path, replan=True)[row.key]
    assert found["ours"]["temp_bytes"] > 1  # by another count of FLOPs it was measured again
    assert found["plain"] == other


def test_the_predicted_flops_of_the_kept_rows_are_those_counted_apart() -> None:
    kept = load(file_of("feng_huang", "h200"))
    assert len(kept) == 18
    for key, results in kept.items():
        ours = results["ours"]
        # The walk counts an operation an element for concatenations and pads, too: 2.5 points in DARTS.
        assert ours["extra_flops"] == pytest.approx(ours["predicted_extra_flops"], abs=0.03), key


def test_the_command_says_what_it_does_not_know() -> None:
    command = [sys.executable, "-m", "benchmarks.run", "feng_huang", "--rows", "resnet51"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent.parent, check=False)
    assert ran.returncode == 2
    assert "expected rows of feng_huang (alexnet" in ran.stderr


def test_rows_name_examples_once() -> None:
    for rows in TABLES.values():
        assert {row.network for row in rows} <= set(EXAMPLES)
        assert len({row.key for row in rows}) == len(rows)
    assert len(FENG_HUANG) == 18
    published = [row.published for row in FENG_HUANG if row.published]
    # Their percentages are of their own MB.
    assert all(abs(1 - p.optimized_mb / p.plain_mb - p.cut) < 0.01 for p in published if p.plain_mb and p.optimized_mb)


def test_the_sources_own_programs_say_what_was_found_of_them() -> None:
    by_name = {row.network: row.published for row in FENG_HUANG if row.published}
    cuts = {name: 1 - p.in_theory_mb[1] / p.in_theory_mb[0] for name, p in by_name.items() if p.in_theory_mb}
    asked = {"resnet50": 0.71, "resnet152": 0.83, "densenet121": 0.82, "densenet201": 0.86, "vgg16": 0.51}
    asked |= {"alexnet": 0.63, "inception_v3": 0.77}
    assert {name: round(cuts[name], 2) for name in asked} == asked
    assert by_name["resnet50"].by_partitioner_mb == pytest.approx(2863, abs=1)
    assert by_name["densenet121"].by_partitioner_mb == pytest.approx(789, abs=1)


def test_the_policies_are_those_of_jax() -> None:
    assert all(hasattr(jax.checkpoint_policies, policy) for policy in POLICIES)


def test_a_policy_round_the_network_is_in_the_step() -> None:
    row = SMALL[0]
    flops = {
        name: variants.count_flops(variants.write(row, name, "cpu", {}))
        for name in ("plain", "nothing_saveable", "everything_saveable")
    }
    assert flops["nothing_saveable"] > 1.2 * flops["plain"]
    assert flops["everything_saveable"] < 1.02 * flops["plain"]


def test_a_budget_may_be_that_of_another_variant() -> None:
    row, known = SMALL[0], {"nn.remat": {"physical_peak_bytes": 10**12}}
    written = variants.write(row, "ours@nn.remat", "cpu", known)
    assert written.plan is not None
    assert written.plan.budget == 10**12
    by_flops = variants.write(row, "ours-by-flops@0.5", "h200", {})
    assert by_flops.plan is not None
    seconds, flops = by_flops.plan.predicted.extra_seconds, by_flops.plan.predicted.extra_flops
    assert seconds == pytest.approx(flops / resolve_target("h200").flops["float32"])
    with pytest.raises(ValueError, match=r"expected a fraction.*'chen'; measure it first"):
        variants.write(row, "ours@chen", "cpu", known)
    with pytest.raises(ValueError, match=r"unknown variant 'theirs'; known are plain, nn\.remat"):
        variants.write(row, "theirs", "cpu", known)


def test_a_variant_that_fails_is_told_and_the_next_are_measured() -> None:
    row = SMALL[0]
    request = Request("small", row.key, "cpu", ["theirs", "plain"], {})
    found = {
        message["variant"]: message["result"] for message in run.run_in_process(request, 300) if "result" in message
    }
    assert found["theirs"]["error"].startswith("ValueError: unknown variant")
    assert found["plain"]["temp_bytes"] > 0
    assert run.missing_of(row, ["theirs", "plain"], {row.key: found}, again=False) == ["theirs"]
    assert run.missing_of(row, ["theirs", "plain"], {row.key: found}, again=True) == ["theirs", "plain"]


def test_a_step_runs_with_a_plan_that_was_made_before(tmp_path: Path) -> None:
    row = next(row for row in SMALL if row.network == "gpt_scan")
    on_gpu.plan_row("small", row, ["plain", "ours@0.5", "tuned@0.5"], on_gpu.ATTACHED, tmp_path)
    request = gpu_row.Request("small", row.key, ["plain", "ours@0.5", "ours@0.3", "tuned@0.5"], str(tmp_path), 1)
    found = {answer["variant"]: answer["result"] for answer in gpu_row.measure(request)}
    assert found["ours@0.5"]["temp_bytes"] == found["ours@0.5"]["checked_temp_bytes"]
    assert found["ours@0.5"]["temp_bytes"] < 0.6 * found["plain"]["temp_bytes"]
    assert found["ours@0.5"]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-5)
    assert "ours_at_0.3" in found["ours@0.3"]["error"]  # its plan was not made
    assert found["tuned@0.5"]["temp_bytes"] < 0.6 * found["plain"]["temp_bytes"]
    assert on_gpu.to_markdown({row.key: found}).count("gpt_scan") == 4


def test_a_session_on_a_gpu_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(request: gpu_row.Request, *, time_limit: float, **_: Any) -> Iterator[dict[str, Any]]:
        asked.append((request.key, time_limit))
        monkeypatch.setattr("benchmarks.on_gpu.time.monotonic", lambda: 60.0 * len(asked))
        yield from ({"variant": one, "result": {"error": "no GPU"}} for one in request.variants)

    monkeypatch.setattr(on_gpu, "ask", ask)
    monkeypatch.setattr("benchmarks.on_gpu.time.monotonic", lambda: 0.0)
    options = {"results": tmp_path, "plans": tmp_path, "minutes": 2.5, "time_limit": 90, "again": False}
    options |= {"at_once": 1, "memory_fraction": 1.0, "turns": 1}
    on_gpu.run(on_gpu.session(), argparse.Namespace(**options))
    assert asked == [("resnet50", 90), ("gpt_1b_scan bfloat16", 90), ("lstm_scan", 30)]
    assert on_gpu.session()[1].row.dtype == "bfloat16"
    assert {variant for one in on_gpu.session() for variant in one.variants} >= {"tuned@0.3", "offload@0.3", "split@8"}


def test_steps_are_timed_in_turns() -> None:
    row = next(row for row in SMALL if row.network == "gpt_scan")
    ratios = time_variants(row, ["nn.remat"], {}, 1)
    assert list(ratios) == ["plain", "nn.remat"]
    assert ratios["plain"] == 1.0
    assert ratios["nn.remat"] > 0.0


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [("false", 300, "its process died: it said nothing"), (sys.executable, 0.2, "took more than 0 s")],
)
def test_a_process_that_ends_too_early_or_too_late_is_a_failed_variant(
    program: str, limit: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    request = Request("small", SMALL[0].key, "cpu", ["plain"], {})
    assert [message["result"] for message in run.run_in_process(request, limit)] == [{"error": said}]


def made(temp: float, flops: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"temp_bytes": temp, "physical_peak_bytes": temp, "extra_flops": flops, "jax_version": "1", **more}


def test_the_table_compares_with_the_published_figures(tmp_path: Path) -> None:
    rows = FENG_HUANG[:2]  # AlexNet, 34 % and 3287 MB; VGG-11, 22 % and 2781 MB
    file = tmp_path / "table.json"
    keep(file, rows, "vgg11", "plain", made(4000e6))
    keep(file, rows, "vgg11", "ours", made(3000e6, 0.1))
    keep(file, rows, "vgg11", "ours-by-flops@nn.remat", made(3500e6, 0.05))
    keep(file, rows, "alexnet", "plain", made(4000e6))
    keep(file, rows, "alexnet", "broken", {"error": "ValueError: no"})
    results = keep(file, rows, "alexnet", "ours", made(3000e6, 0.3, predicted_peak_bytes=2400e6))
    assert list(results) == ["alexnet", "vgg11"]
    assert json.loads(file.read_text(encoding="utf-8")) == results
    assert cut_of(results["alexnet"]) == pytest.approx(0.25)
    text = to_markdown("feng_huang", "h200", rows, results)
    assert "| network | plain | ours | broken | ours by FLOPs, as nn.remat |" in text
    assert "saves 25% on average over 2 of 2 rows" in text
    assert "A cut at least as large as the published one in 1 of 2 rows" in text
    assert "Less memory than the published one, in MB, in 1 of 2 rows" in text
    assert "20% on average, 30% at most" in text
    assert "- alexnet, broken: ValueError: no" in text
    assert "| alexnet | 3000 | 2400 | -20% | 25% |" in text
    assert "| alexnet | 3000 | 25% | 3040 | 1117 | 63% | – |" in text


def test_what_lies_below_our_frontier() -> None:
    results = {"plain": made(100), "ours": made(20, 0.3), "ours@0.5": made(50, 0.1)}
    others = {
        "nothing_saveable": made(60, 0.1),  # above our frontier
        "nn.remat": made(20, 0.3),  # the same as one of ours
        "dots_saveable": made(50, 0.05),  # fewer FLOPs than any of ours in so little memory
        "everything_saveable": made(10, 0.4),  # less memory than any of ours
        "chen": made(5, 0.0),  # our own writer
    }
    assert below_our_frontier({**results, **others}) == ["dots_saveable", "everything_saveable"]
    by_flops = {"ours-by-flops@dots_saveable": made(50, 0.05)}
    assert below_our_frontier({**results, **others, **by_flops}) == ["everything_saveable"]


@pytest.mark.parametrize("name", FROM_RESULTS)
def test_the_tables_of_the_pages_are_made_from_the_kept_results(name: str) -> None:
    for page in REGIONS[name]:
        assert f"<!-- {name} -->\n{FROM_RESULTS[name]()}\n<!-- end {name} -->" in page.read_text(encoding="utf-8")


# MB of temporary memory that were asked for when the project began, for at most 35 % more FLOPs.
ASKED_MB = {
    "resnet50, 64, 224 h200": 1350,
    "resnet152, 16, 224 h200": 420,
    "densenet121, 32, 224 h200": 520,
    "densenet201, 16, 224 h200": 336,
    "vgg16, 64, 224 h200": 3300,
    "alexnet, 1024, 224 h200": 2400,
    "resnet50, 8, 128 cpu": 95,
    "resnet50, 64, 224 v5e": 1600,
}


@pytest.mark.parametrize("key", ASKED_MB)
def test_the_kept_rows_need_no_more_memory_than_was_asked(key: str) -> None:
    kept = load(RESULTS / "predicted_memory.json")[key]
    assert kept["measured"]["optimized"]["temp_bytes"] <= ASKED_MB[key] * 1e6
    assert kept["walked_extra_flops"] <= 0.35


# The looped networks of `benchmarks.loops`

LOOPS = load(loops.FILE)


def test_a_loop_comes_out_as_it_is_kept() -> None:
    (row,) = [row for row in loops.ROWS if row.key == "lstm"]
    found, kept = loops.measure_row(row), LOOPS[row.key]
    if kept["jax_version"] == jax.__version__:
        assert found["plain_bytes"] == pytest.approx(kept["plain_bytes"], rel=0.01)
        assert found["temp_bytes"] == pytest.approx(kept["temp_bytes"], rel=0.02)
    assert found["extra_flops"] == pytest.approx(kept["extra_flops"], abs=0.01)


def test_the_kept_loops_need_what_was_asked() -> None:
    assert set(LOOPS) == {row.key for row in loops.ROWS}
    for row in loops.ROWS:
        found = LOOPS[row.key]
        if row.asked_mb is not None:
            assert found["temp_bytes"] <= row.asked_mb * 1e6, row.key
        if row.asked_flops is not None:
            assert found["extra_flops"] <= row.asked_flops, row.key
        if row.budget is not None:
            assert found["temp_bytes"] <= row.budget * found["plain_bytes"], row.key


def test_layers_as_a_python_loop_and_as_a_scan_need_about_the_same() -> None:
    scanned, unrolled = LOOPS["gpt"]["temp_bytes"], LOOPS["gpt, Python loop"]["temp_bytes"]
    assert abs(scanned - unrolled) <= 0.15 * min(scanned, unrolled)


def test_four_times_the_steps_take_at_most_twice_the_memory() -> None:
    few, some, many = (LOOPS[key]["temp_bytes"] for key in ("lstm, 256 steps", "lstm", "lstm, 4096 steps"))
    assert some <= 2 * few
    assert many <= 2 * some
