"""Pictures of plans: where tensors are over the step, and that what is drawn can be read."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from random_graphs import Sketch, training_chain
from training_steps import STEPS

import remat_opt
from benchmarks.pictures import PICTURES
from benchmarks.pictures import STEPS as DRAWN
from benchmarks.run_pages import ROOT
from benchmarks.tables import TABLES
from remat_opt.graph.graph import Graph
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, Transfer
from remat_opt.report.curves import curve_of, host_curve
from remat_opt.report.lives import MOST_TENSORS, Life, Place, lives_of
from remat_opt.report.pictures import draw_step

SAVED, FREED, RECOMPUTED, HOST = Place.SAVED, Place.FREED, Place.RECOMPUTED, Place.HOST


def lives(graph: Graph, schedule: Schedule, stacks: dict[int, int] | None = None) -> list[Life]:
    liveness = simulate(graph, schedule)
    names = {value: f"value{value}" for value in range(len(graph.sizes))}
    return lives_of(graph, schedule, liveness, curve_of(graph, schedule, liveness), names, stacks or {})


def spans(life: Life) -> list[tuple[float, float, Place]]:
    return [(span.begin, span.end, span.place) for span in life.spans]


def test_each_tensor_is_shown_where_it_is() -> None:
    """Ops 0, 1, 2 make values 1, 2, 3; op 3 is the loss, ops 4, 5, 6 are the backward passes. Each takes a second."""
    graph = training_chain((8, 16, 32))
    plain = Schedule((Run(tuple(range(7))),))
    assert [(life.name, life.size) for life in lives(graph, plain)] == [
        ("value1", 8), ("value2", 16), ("value3", 32), ("value4", 32), ("value5", 16)
    ]  # fmt: skip
    assert spans(lives(graph, plain)[0]) == [(0, 7, SAVED)]
    again = Schedule((Run((0, 1, 2, 3)), Run((4,)), Run((1,), recomputed=True), Run((5, 6))))
    found = {life.name: spans(life) for life in lives(graph, again)}
    assert found["value1"] == [(0, 8, SAVED)]
    assert found["value2"] == [(1, 5, FREED), (5, 7, RECOMPUTED)]


def test_a_tensor_on_the_host_is_shown_there() -> None:
    graph = training_chain((8, 16, 32))
    moved = Schedule((Run(tuple(range(7))),), (Transfer(2, 5, 1),))
    found = {life.name: spans(life) for life in lives(graph, moved)}
    assert found["value1"] == [(0, 2, SAVED), (2, 5, HOST), (5, 7, SAVED)]
    host = host_curve(graph, moved, {})
    assert host.live.tolist() == [8, 8, 8, 8, 8, 0, 0, 0]
    assert host.seconds == graph.seconds


def test_what_a_loop_puts_on_the_host_is_shown_with_its_bytes() -> None:
    """A stack on the host has no bytes in the graph."""
    sketch = Sketch()
    stack, carry = sketch.ops_of(sizes=(0, 8))
    last = sketch.op(sketch.op(carry, size=8), stack, size=8)
    graph, schedule = sketch.graph(last), Schedule((Run((0, 1, 2)),))
    assert {life.name: (life.size, spans(life)) for life in lives(graph, schedule, {stack: 100})} == {
        "value0": (100, [(0, 3, HOST)]),
        "value1": (8, [(0, 2, SAVED)]),
        "value2": (8, [(1, 3, SAVED)]),
    }
    assert host_curve(graph, schedule, {stack: 100}).live.tolist() == [100, 100, 100, 0]


def test_of_equal_layers_some_are_shown_and_all_on_the_host() -> None:
    graph = training_chain([16, *[8] * 59])
    order = (Run(tuple(range(len(graph.ops)))),)
    shown = [int(life.name.removeprefix("value")) for life in lives(graph, Schedule(order))]
    assert len(shown) == MOST_TENSORS
    assert shown[:2] == [1, 2]  # the largest, and the first of the others
    assert set(np.diff(shown[1:])) <= {2, 3, 4}  # evenly to the last that is live for some time
    moved = Schedule(order, (Transfer(59, 63, 58),))
    assert {life.name for life in lives(graph, moved)} >= {"value58", *(f"value{value}" for value in shown)}


# Pictures of real steps


def scanned(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Twelve layers in a loop."""

    def loss(weights: jax.Array) -> jax.Array:
        last, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, weights)
        return jnp.sum(last**2)

    value, grads = jax.value_and_grad(loss)(state)
    return state - 1e-3 * grads, value


SCANNED_ARGS = (jax.ShapeDtypeStruct((12, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))


def explained(name: str) -> remat_opt.Explanation:
    if name in ("loop", "plain loop"):
        budget = 1.0 if name == "plain loop" else None
        return remat_opt.optimize(scanned, verify=False, budget=budget).explain(*SCANNED_ARGS)
    case = STEPS["mlp"]()
    split = 4 if name == "chunks" else False
    return remat_opt.optimize(case.step, verify=False, split=split).explain(*case.make_args())


def labels_of(axis: Axis) -> list[Text]:
    """The labels of the ticks that are in view."""
    low, high = sorted(axis.get_view_interval())
    return [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


@pytest.mark.parametrize("name", ["recomputation", "chunks", "loop", "plain loop"])
def test_no_words_of_a_picture_overlap(name: str) -> None:
    figure = draw_step(explained(name))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [
        (text.get_text(), text.get_window_extent(canvas.get_renderer()))
        for axes in figure.axes
        for text in [
            *axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.get_legend().texts,
            *labels_of(axes.xaxis), *labels_of(axes.yaxis),
        ]
        if text.get_text() and text.get_visible()
    ]  # fmt: skip
    inside = figure.bbox
    assert not [text for text, box in boxes if box.x0 < 0 or box.x1 > inside.x1 or box.y0 < 0 or box.y1 > inside.y1]
    overlapping = [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]
    assert not overlapping


def test_loops_and_chunks_are_named() -> None:
    loops = explained("loop").loop_times
    assert [text for _, _, text in loops] == ["loop of 12 steps", "loop in reverse"]  # on two levels it is several
    plain = explained("plain loop").loop_times
    assert [text for _, _, text in plain] == ["loop of 12 steps", "loop of 12 steps in reverse"]
    assert [text for _, _, text in explained("chunks").loop_times] == ["batch in 4 chunks"]
    times = np.array([(begin, end) for begin, end, _ in loops])
    assert (np.diff(times.ravel()) >= 0).all()


# Pictures of the pages


def shown() -> set[str]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return {Path(name).name for page in pages for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())}


def test_every_picture_is_shown_and_can_be_drawn_again() -> None:
    there = {file.name for file in PICTURES.iterdir()}
    rows = {row.network for rows in TABLES.values() for row in rows}
    of_rows = {f"{network}_h200_{kind}.png" for network in rows for kind in ("step", "frontier")}
    assert there == {name for name in shown() if name.endswith(".png")}
    assert there <= of_rows | {f"{name}.png" for name in DRAWN}
