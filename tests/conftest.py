"""Runs before any test file is imported: the platform of all tests, and of their child processes, is the CPU."""

import gc
import os
import sys

import hypothesis

from benchmarks.fuzz import QUICK

# JAX reads the variable once, when it is imported. The absent compilers need it too: without it the CUDA plugin looks
# for a driver. (What that plugin logs on import comes from C++ and heeds no variable.)
if "jax" in sys.modules:
    raise RuntimeError(
        "expected tests/conftest.py to come before jax; a pytest plugin imported it: try pytest -p no:NAME"
    )
os.environ["JAX_PLATFORMS"] = "cpu"

# Tests compile more than five thousand programs. What the CPU compiler spends most time on is the machine code, which
# is not what is tested: buffers and the order of operations are decided before.
os.environ["XLA_FLAGS"] = f"{QUICK} {os.environ.get('XLA_FLAGS', '')}"

# The same examples in every run. Times are not bounded: the first call of a test compiles, and machines are shared.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
# `pytest --hypothesis-profile=explore` looks for new counterexamples.
hypothesis.settings.register_profile("explore", max_examples=2000, deadline=None)
# As many as a night has time for: `pytest tests/test_hostile_plans.py --hypothesis-profile=nightly`.
hypothesis.settings.register_profile("nightly", max_examples=5000, deadline=None)
hypothesis.settings.load_profile("repeatable")

# Looking for garbage among all that tracers hold, as often as Python does, takes a twentieth of the time.
gc.set_threshold(50_000, 10, 10)
