"""What `explain` says and draws: true figures, true reasons, readable on a terminal."""

import dataclasses
import html
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from random_graphs import Sketch
from training_steps import STEPS

import remat_opt
from remat_opt.graph.derive import Choice, derive
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import save_everything
from remat_opt.planner.plan import Plan, Prediction, pack
from remat_opt.report.curves import curve_of, draw
from remat_opt.report.explain import Explanation
from remat_opt.report.saved import Reason, join_names, reasons_of
from remat_opt.units import format_bytes, format_change, format_count, format_flops, format_seconds

WIDEST = 100  # columns


# Units


UNITS = [
    (format_bytes, (0,), "0 bytes"), (format_bytes, (512,), "512 bytes"), (format_bytes, (2048,), "2.0 kB"),
    (format_bytes, (262_144,), "0.3 MB"), (format_bytes, (84_594_592,), "84.6 MB"),
    (format_bytes, (5_930_000_000,), "5,930.0 MB"), (format_bytes, (80e9,), "80.0 GB"),  # comparable up to 10 GB
    (format_flops, (12,), "12 FLOP"), (format_flops, (60.4e9,), "60.4 GFLOP"), (format_flops, (3e12,), "3.0 TFLOP"),
    (format_seconds, (2e-6,), "2 µs"), (format_seconds, (0.068,), "68 ms"), (format_seconds, (1.7,), "1.7 s"),
    (format_seconds, (125,), "2 min 05 s"),
    (format_change, (30, 100), "−70 %"), (format_change, (131, 100), "+31 %"), (format_change, (106.8, 100), "+6.8 %"),
    (format_change, (100, 100), "±0 %"), (format_change, (1, 0), ""),
    (format_count, (1, "tensor"), "1 tensor"), (format_count, (2600, "tensor"), "2,600 tensors"),
]  # fmt: skip


@pytest.mark.parametrize(("shown", "values", "text"), UNITS)
def test_figures_have_their_units(shown: Callable[..., str], values: tuple, text: str) -> None:
    assert shown(*values) == text


# Saved tensors


def test_names_that_differ_in_numbers_are_joined() -> None:
    assert join_names(["block1/relu", "block2/relu", "block3/relu", "block7/relu"]) == "block{1-3,7}/relu"
    assert join_names(["stage2_block01/relu#3"]) == "stage2_block01/relu#3"


def test_each_reason_is_read_off_the_schedule() -> None:
    """a → b → c → d → e going forward, with a cut before c; the backward reads b, c, d and e."""
    sketch = Sketch()
    a = sketch.op(size=8)
    b = sketch.op(a, size=8)
    c = sketch.op(b, size=8)
    d = sketch.op(c, size=8, repeatable=False)
    e = sketch.op(d, size=8)
    last = sketch.op(e, size=1)
    for value in (d, c, b, a):
        last = sketch.op(last, value, size=1)
    plan = plan_of(sketch.graph(last), Choice(frozenset({b, c, d, e}), boundaries=(4,), cuts=(2, 4)))
    assert reasons_of(plan, sketch.graph(last), [c, d, e]) == {
        c: Reason.NOT_RECOMPUTED,
        d: Reason.NOT_REPEATABLE,
        e: Reason.NOT_RECOMPUTED,
    }


def test_what_a_later_segment_is_recomputed_from_crosses_a_cut() -> None:
    sketch = Sketch()
    a = sketch.op(size=8)
    b = sketch.op(a, size=8)
    inner = sketch.op(b, size=8)
    c = sketch.op(inner, b, size=8)
    last = sketch.op(c, size=1)
    for value in (c, inner, b, a):
        last = sketch.op(last, value, size=1)
    graph = sketch.graph(last)
    plan = plan_of(graph, Choice(frozenset({b}), boundaries=(4,), cuts=(2, 4)))
    assert reasons_of(plan, graph, [b])[b] is Reason.CROSSES_A_CUT
    plan = plan_of(graph, Choice(frozenset({b, inner}), boundaries=(4,), cuts=(2, 4)))
    assert reasons_of(plan, graph, [b, inner])[inner] is Reason.EXPENSIVE
    drawn = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, name="random_bits") for op in graph.ops))
    assert reasons_of(plan, drawn, [b, inner])[inner] is Reason.RANDOM


def plan_of(graph: Graph, choice: Choice) -> Plan:
    """A plan by hand, without figures."""
    schedule = derive(graph, choice, range(len(graph.ops)))
    nothing = Prediction(0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    return Plan("", (), len(graph.ops), "cpu", "auto", None, (), choice, pack(schedule), nothing)


# Curves


def climbing() -> Graph:
    """Results of 10, 20 and 30 bytes, then their backward; the last op takes as long as all others."""
    sketch = Sketch()
    results = [sketch.op(size=10)]
    for size in (20, 30):
        results.append(sketch.op(results[-1], size=size))
    last = sketch.op(results[-1], size=1)
    for value in reversed(results):
        last = sketch.op(last, value, size=1, seconds=1.0 if value != results[0] else 6.0)
    return sketch.graph(last)


def test_a_curve_has_the_peak_of_the_liveness_model() -> None:
    graph = climbing()
    schedule = save_everything(graph)
    liveness = simulate(graph, schedule)
    curve = curve_of(graph, schedule, liveness)
    assert curve.peak == liveness.peak
    assert curve.seconds == graph.seconds
    assert curve.peak_seconds == 4.0  # while the backward of the second result runs
    assert not curve.recomputed.any()


def test_a_curve_is_drawn_to_scale() -> None:
    graph = climbing()
    schedule = save_everything(graph)
    curve = curve_of(graph, schedule, simulate(graph, schedule))
    marker, *rows = draw(curve, width=48, height=4, seconds=2 * curve.seconds, top=2 * curve.peak)
    assert max(map(len, rows)) <= 24  # half of the width for half of the time
    assert [row.strip() != "" for row in rows] == [False, False, True, True]  # half of the height
    assert rows[2][marker.index("▼")] == "█"
    assert rows[3].startswith("▃▃")  # 10 of 2 * 61 bytes on 4 lines of 8 eighths


def test_recomputation_is_underlined() -> None:
    graph = climbing()
    schedule = derive(graph, Choice(boundaries=(3,), cuts=(1, 3)), range(len(graph.ops)))
    assert schedule.recomputed
    curve = curve_of(graph, schedule, simulate(graph, schedule))
    assert draw(curve, width=60, height=2, seconds=curve.seconds, top=curve.peak)[-1].strip("━ ") == ""
    spent = np.diff(curve.begins)[curve.recomputed].sum()
    assert spent == schedule.extra_seconds(graph)


def test_a_curve_of_nothing_is_flat() -> None:
    graph = Graph((4,), (), inputs=(0,), outputs=(0,))
    schedule = save_everything(graph)
    curve = curve_of(graph, schedule, simulate(graph, schedule))
    assert curve.peak == 0
    assert draw(curve, width=10, height=2, seconds=curve.seconds, top=0)


def test_a_curve_refuses_the_liveness_of_another_schedule() -> None:
    graph = climbing()
    with pytest.raises(ValueError, match="expected the liveness of this schedule"):
        curve_of(graph, derive(graph, Choice(boundaries=(2,)), range(7)), simulate(graph, save_everything(graph)))


# Explanations of real steps


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    case = STEPS["mlp"]()
    return remat_opt.optimize(case.step).explain(*case.make_args(), **case.make_kwargs())


@pytest.mark.short
def test_the_text_has_the_plans_own_figures(explanation: Explanation) -> None:
    plan, text = explanation.plan, str(explanation)
    assert not plan.is_plain
    assert format_bytes(plan.predicted.plain_peak_bytes) in text
    assert format_bytes(plan.predicted.peak_bytes) in text
    assert format_change(plan.predicted.peak_bytes, plan.predicted.plain_peak_bytes) in text
    assert format_flops(plan.predicted.extra_flops) in text
    assert f"{100 * plan.predicted.extra_flops / plan.predicted.flops:.1f} %" in text
    assert f"{format_count(len(explanation.held), 'tensor')} ({format_bytes(explanation.held_bytes)})" in text
    assert f"target {plan.target}, solver {plan.solver}, no budget" in text
    assert format_count(sum(run.recomputed for run in plan.schedule.runs), "segment") in text
    assert all(word in text for word in ("tracing", "graph", "search", "dot_general"))


def test_the_text_fits_a_terminal_and_shows_both_curves(explanation: Explanation) -> None:
    lines = str(explanation).split("\n")
    assert max(map(len, lines)) <= WIDEST
    assert sum(line.strip() == "▼" for line in lines) == 2
    assert any("━" in line for line in lines)


def test_the_curves_peak_where_the_plan_says(explanation: Explanation) -> None:
    predicted = explanation.plan.predicted
    assert explanation.before.peak == predicted.plain_peak_bytes
    assert explanation.after.peak == predicted.peak_bytes
    # The curve counts what compilers store beyond the graph of the search, and the time of storing and reading it.
    assert predicted.seconds <= explanation.before.seconds <= 1.15 * predicted.seconds
    assert explanation.after.seconds == pytest.approx(predicted.seconds + predicted.extra_seconds)


@pytest.mark.parametrize("name", ["conv_net", "micro_batches"])
def test_the_curve_before_is_of_the_original_step(name: str) -> None:
    """Masks and loops that only the rewritten step has are not in it."""
    case = STEPS[name]()
    found = remat_opt.optimize(case.step).explain(*case.make_args(), **case.make_kwargs())
    assert found.before.peak == found.plan.predicted.plain_peak_bytes


def test_held_tensors_are_saved_ones(explanation: Explanation) -> None:
    assert set(explanation.held.values()) <= set(explanation.plan.saved)
    assert explanation.held_bytes > 0
    assert sum(group.count for group in explanation.groups) == len(explanation.held)
    assert sum(group.total for group in explanation.groups) == explanation.held_bytes
    assert sum(total.flops for total in explanation.repeated) == pytest.approx(explanation.plan.predicted.extra_flops)


def test_the_compilers_figures_are_there_where_a_budget_was_checked() -> None:
    case = STEPS["mlp"]()
    found = remat_opt.optimize(case.step, budget=0.6).explain(*case.make_args(), **case.make_kwargs())
    measured, plain = found.plan.measured, found.plan.plain_measured
    assert measured is not None
    assert plain is not None
    text = str(found)
    assert "budget 0.6 of the plain step's temporary memory" in text
    assert format_bytes(measured.temp_bytes) in text
    assert format_bytes(plain.temp_bytes) in text
    assert format_bytes(measured.physical_peak_bytes) in text
    assert "compiling to check" in text


def plain_explanation() -> Explanation:
    """Of a plan that changes nothing."""
    graph = climbing()
    schedule = save_everything(graph)
    liveness = simulate(graph, schedule)
    predicted = Prediction(liveness.peak, liveness.peak, 0, graph.flops, 0.0, graph.seconds, 0.0)
    note = "nothing to gain: recomputing anything would not lower the peak"
    plan = Plan("", (), 7, "cpu", "auto", "12GiB", (), Choice(), pack(schedule), predicted, note=note)
    return Explanation(plan, graph, graph, liveness, liveness, {}, {})


def test_a_step_with_nothing_to_gain_says_so() -> None:
    found = plain_explanation()
    text = str(found)
    assert "The step runs as it was given: nothing to gain" in text
    assert 'budget "12GiB"' in text
    assert "Recomputed" not in text
    assert found.segments == []
    assert sum(line.strip() == "▼" for line in text.split("\n")) == 1


# Pictures


def test_the_picture_is_a_png(explanation: Explanation, tmp_path: Path) -> None:
    explanation.save(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_plain_plan_has_a_picture_too(tmp_path: Path) -> None:
    plain_explanation().save(tmp_path / "picture.svg")
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes()


def test_without_matplotlib_the_error_names_the_extra(
    explanation: Explanation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "remat_opt\[plot\]"'):
        explanation.save(tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


def test_notebooks_show_the_picture_and_the_text(explanation: Explanation) -> None:
    shown = explanation._repr_html_()
    assert shown.startswith("<div>\n<svg ")
    assert html.escape(str(explanation)) in shown


def test_notebooks_without_matplotlib_show_the_text(explanation: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = explanation._repr_html_()
    assert "<svg" not in shown
    assert html.escape(str(explanation)) in shown
