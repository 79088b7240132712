"""`remat_opt.frontier`: memory against time, predicted."""

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
    assert "100%" in lines[-1] or " MB" in lines[-1]


def test_it_is_drawn_and_shown_in_notebooks(front, tmp_path) -> None:
    front.save(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    shown = front._repr_html_()
    assert "<svg " in shown
    assert str(front) in shown
