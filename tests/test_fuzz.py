"""Random training steps, rewritten in many ways: the same values to the bit, the same types, never a higher peak.

`python -m benchmarks.fuzz` runs thousands of them.
"""

import random
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import remat_opt.write.train_step
from remat_opt import optimize
from remat_opt.graph.schedule import Run, Schedule
from remat_opt.program import compat, inline
from tests.program_checks import How, any_way, check_compiled, check_rewritten, prepared_of
from tests.random_programs import RandomProgram, programs, random_program

def few(count: int) -> Callable:
    """So many programs, each as slow as it may be."""
    return hypothesis.settings(max_examples=count, suppress_health_check=list(hypothesis.HealthCheck))


def rewritten(program: RandomProgram, how: How) -> None:
    hypothesis.event("rewritten" if check_rewritten(program, how) else "nothing to gain")


@few(40)
@given(program=programs(most_statements=12), way=st.randoms(use_true_random=False))
def test_small_programs_keep_their_values_for_any_target_solver_and_budget(program: RandomProgram, way: Any) -> None:
    rewritten(program, any_way(way))


@few(24)
@given(program=programs(most_statements=20), share=st.sampled_from([None, -1.0, 0.5]))
def test_programs_keep_their_values_with_the_search_that_users_get(program: RandomProgram, share: float | None) -> None:
    rewritten(program, How("cpu", "auto", share))


@pytest.mark.parametrize("seed", range(4))
def test_large_programs_keep_their_values(seed: int) -> None:
    source = random.Random(f"large/{seed}")
    for _ in range(6):
        check_rewritten(random_program(source, source.choice((30, 40, 60))), How("h200", "lower_sets", None))


@few(12)
@given(program=programs(most_statements=12))
def test_programs_give_their_values_when_they_are_compiled_and_called(program: RandomProgram) -> None:
    hypothesis.event("rewritten" if check_compiled(program, 0.7) else "nothing to gain")
