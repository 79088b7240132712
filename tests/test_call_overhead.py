"""Nothing of ours runs once a signature is compiled: a call costs what a call of a jitted step costs."""

import pytest

from benchmarks import call_overhead

MOST_SECONDS = 50e-6
TRIES = 4  # of which one has to succeed: other processes can only make a call longer


@pytest.mark.short
def test_a_call_of_an_optimised_step_takes_as_long_as_one_of_the_plain_step() -> None:
    seconds = []
    while len(seconds) < TRIES and (not seconds or seconds[-1] >= MOST_SECONDS):
        seconds.append(call_overhead.overhead_seconds()[0])
    assert min(seconds) < MOST_SECONDS, f"{1e6 * min(seconds):.1f} µs"


def test_the_state_is_as_large_as_a_real_one() -> None:
    assert len(call_overhead.new_state()) == 429
