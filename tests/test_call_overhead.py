"""Nothing of ours runs once a signature is compiled: a call costs what a call of a jitted step costs."""

import subprocess
import sys

import pytest

from benchmarks import call_overhead

MOST_SECONDS = 50e-6
MOST_OF_JAX = 0.6  # of the seconds of its import
TRIES = 4  # of which one has to succeed: other processes can only make a call longer


@pytest.mark.short
def test_a_call_of_an_optimised_step_takes_as_long_as_one_of_the_plain_step() -> None:
    seconds = []
    while len(seconds) < TRIES and (not seconds or seconds[-1] >= MOST_SECONDS):
        seconds.append(call_overhead.overhead_seconds()[0])
    assert min(seconds) < MOST_SECONDS, f"{1e6 * min(seconds):.1f} µs"


def test_the_state_is_as_large_as_a_real_one() -> None:
    assert len(call_overhead.new_state()) == 429


@pytest.mark.short
def test_an_import_takes_less_than_that_of_jax() -> None:
    """0.2 of a second on an idle machine, 0.5 for JAX; whatever is imported for a picture or a framework takes more."""
    code = (
        "import time; t = [time.process_time()]\nimport jax, jax.numpy\nt.append(time.process_time())\n"
        "import remat_opt\nt.append(time.process_time())\nprint((t[2] - t[1]) / (t[1] - t[0]))"
    )
    shares = []
    while len(shares) < TRIES and (not shares or shares[-1] >= MOST_OF_JAX):
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, encoding="utf-8")
        shares.append(float(said.stdout))
    assert min(shares) < MOST_OF_JAX
