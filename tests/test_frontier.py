"""`remat_opt.frontier`: memory against time, predicted."""

import dataclasses
import itertools

import jax
import pytest
from checks import assert_close
from training_steps import STEPS

import remat_opt

pytestmark = pytest.mark.xdist_group("frontier")


@pytest.fixture(scope="module")
def case():
    return STEPS["has_aux"]()


@pytest.fixture(scope="module")
def front(case):
    return remat_opt.frontier(case.step, *case.make_args())


def test_it_leads_from_the_minimum_memory_to_the_original_step(case, front) -> None:
    least = remat_opt.optimize(case.step).plan(*case.make_args())
    assert front[0].peak_bytes <= least.predicted.peak_bytes  # at any cost; without a budget one forward pass at most
    assert front.cheapest_within(least.predicted.peak_bytes).extra_seconds <= least.predicted.extra_seconds
    assert front[-1].plan.is_plain
    assert front[-1].extra_seconds == 0
    assert len(front) >= 4


def test_more_memory_takes_less_time(front) -> None:
    for less, more in itertools.pairwise(front):
        assert less.peak_bytes <= more.peak_bytes
        assert less.extra_seconds > more.extra_seconds


def test_a_budget_picks_the_cheapest_point_that_fits(front) -> None:
    middle = (front[0].peak_bytes + front[-1].peak_bytes) // 2
    chosen = front.cheapest_within(middle)
    assert chosen.peak_bytes <= middle
    assert all(point.extra_seconds >= chosen.extra_seconds for point in front if point.peak_bytes <= middle)
    with pytest.raises(ValueError, match=str(front[0].peak_bytes)):
        front.cheapest_within(front[0].peak_bytes - 1)


def test_a_point_can_be_used_and_computes_the_same(case, front) -> None:
    step = remat_opt.optimize(case.step, plan=front[1].plan)
    assert_close(step(*case.make_args()), jax.jit(case.step)(*case.make_args()))


def test_it_prints_a_table(front) -> None:
    lines = str(front).splitlines()
    assert len(lines) == len(front) + 1
    assert lines[-1].split() == [lines[-1].split()[0], "MB", "100%", "0.0%", "0.0%", "plain"]


def test_the_table_ends_with_the_plain_step_and_has_no_line_twice(front) -> None:
    """Where a point that needs less memory is as fast as the plain step, that is none of the points."""
    faster = dataclasses.replace(front[-2], extra_seconds=-0.1 * front[-2].plan.predicted.seconds)
    lines = str(dataclasses.replace(front, points=(*front.points[:-2], faster, faster))).splitlines()
    assert lines[-1] == str(front).splitlines()[-1]
    assert "-10.0%" in lines[-2]
    assert "-10.0%" not in lines[-3]


def test_the_figures_of_several_devices_are_those_of_one(front) -> None:
    halves = [dataclasses.replace(p, peak_bytes=p.peak_bytes // 2, extra_seconds=p.extra_seconds / 2) for p in front]
    whole, half = (str(one).splitlines() for one in (front, dataclasses.replace(front, points=halves, devices=2)))
    without_bytes = [[line.split()[1:] for line in lines] for lines in (whole, half)]
    assert without_bytes[0] == without_bytes[1]
    assert float(half[-1].split()[0]) == pytest.approx(float(whole[-1].split()[0]) / 2, abs=0.06)


def test_it_is_drawn_and_shown_in_notebooks(front, tmp_path) -> None:
    front.save(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    shown = front._repr_html_()
    assert "<svg " in shown
    assert str(front) in shown
