"""Progress of a search: on a terminal, after a while, and nowhere else; and the seconds that planning took."""

import io
import sys
import time

import pytest
import step_networks as networks
from random_graphs import training_chain
from training_steps import STEPS

import remat_opt
from remat_opt import optimize
from remat_opt.planner import progress
from remat_opt.planner.progress import SearchProgress
from remat_opt.search import Problem, search_of
from remat_opt.search.progress import report_progress, reporting_to


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("with_rich", [True, False])
def test_a_terminal_shows_it_and_is_clean_at_the_end(monkeypatch, with_rich: bool) -> None:
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    terminal = Terminal()
    with SearchProgress(terminal, after=0.0) as shown:
        shown(0.25)
        shown(0.5)
        during = terminal.getvalue()
    assert "remat_opt: searching" in during
    if not with_rich:
        assert "50% done" in during  # rich draws its bar at its own pace
    assert len(terminal.getvalue()) > len(during)  # it was taken away


def test_what_is_quick_or_no_terminal_stays_silent() -> None:
    for stream, after in ((io.StringIO(), 0.0), (Terminal(), 60.0)):
        with SearchProgress(stream, after=after) as shown:
            shown(0.5)
        assert stream.getvalue() == ""


def test_a_search_tells_how_far_it_is() -> None:
    shares: list[float] = []
    with reporting_to(shares.append):
        assert search_of(Problem(training_chain([10] * 12))).frontier
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] < 0.2
    assert 0.9 < shares[-1] <= 1.0
    report_progress(0.5)  # nobody watches any more
    assert shares[-1] > 0.9


def test_planning_shows_a_long_search(monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(progress, "AFTER_SECONDS", 0.0)
    monkeypatch.setattr(SearchProgress.__init__, "__defaults__", (None, 0.0, "searching"))
    monkeypatch.setattr(sys, "stderr", terminal)
    case = STEPS["has_aux"]()
    remat_opt.optimize(case.step, verify=False).plan(*case.make_args())
    assert "remat_opt: searching" in terminal.getvalue()


@pytest.mark.short
def test_the_seconds_told_are_all_that_pass_between_the_call_and_the_plan():
    step = optimize(networks.sine_step, target="h200", verify=False)
    arguments = networks.sine_arguments(width=64, layers=6, batch=256)
    started = time.perf_counter()
    step.plan(*arguments)
    passed = time.perf_counter() - started
    told = sum(step._planned.decision(arguments, {}).seconds.values())
    assert 0.9 * passed <= told <= passed
