"""The host's memory that planning takes: it grows with the step, and stays under 2 GiB for 100,000 equations."""

import re
import subprocess
import sys
from pathlib import Path

from checks import by_jax

CHECKOUT = Path(__file__).parent.parent
MOST_PER_EQUATION = 24 << 10  # bytes: half as much again as is taken; of 100,000 each takes a third of that


def test_planning_takes_little_memory_for_each_equation() -> None:
    """`python -m benchmarks.planner_memory 2220` is the whole of it, and takes a minute."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner_memory", "--here", "150"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=True).stdout
    equations, peak, before = map(int, re.search(r"(\d+) equations +(\d+) MiB, of which (\d+) MiB", printed).groups())
    assert equations > by_jax(6_700, 6_400)
    assert (peak - before) << 20 < MOST_PER_EQUATION * equations
