"""Random training steps in float64, split along axes of their arguments: every value as without.

`MORE_PROGRAMS=300 pytest tests/test_split_random.py` draws so many more.
"""

import dataclasses
import math
import os
import random

import jax
import pytest
from split_checks import assert_same

from remat_opt.rewrites.captured import capture
from remat_opt.rewrites.split.batch import batch_along
from remat_opt.rewrites.split.stages import making_rows_again
from remat_opt.trace.inline import Program
from tests.random_programs import ROWS, RandomProgram, random_program


def in_float64(program: RandomProgram) -> RandomProgram:
    source = program.source.replace("bfloat16", "float64").replace("float32", "float64")
    return RandomProgram(source, ())


def axes_of(program: Program, source: random.Random) -> list[tuple[int, int]]:
    """Axes of arguments in random order, those of the batch first."""
    shapes = [program.avals[value].shape for value in program.inputs]
    axes = [(at, axis) for at, shape in enumerate(shapes) for axis, size in enumerate(shape) if size > 1]
    source.shuffle(axes)
    return sorted(axes, key=lambda place: shapes[place[0]][place[1]] != ROWS)


# In all of them something is split; in those from 1021 on, rows are made again.
SEEDS = (1, 3, 5, 19, 20, 114, 211, 212, 213, 214, 1021, 1023, 1036, 1050, 1054)
MORE = range(1000, 1000 + int(os.environ.get("MORE_PROGRAMS", "0")))


@pytest.mark.parametrize("seed", [*SEEDS, *MORE])
def test_random_programs_compute_the_same_in_chunks(seed: int) -> None:
    source = random.Random(seed)
    with jax.enable_x64(True):
        drawn = in_float64(random_program(source, source.choice((6, 10, 12, 16))))
        program = capture(jax.jit(drawn.step), drawn.arguments(), {}).program
        leaves, found = jax.tree.leaves(drawn.arguments()), 0
        for at, axis in axes_of(program, source)[:4]:
            batch = batch_along(program, at, axis)
            if batch.stages.in_loops and found < 2:
                found += 1
                assert_same(program, batch.split(source.choice(batch.numbers)), leaves, rtol=1e-9)
                again = dataclasses.replace(batch, stages=making_rows_again(batch.stages, math.inf))
                if any(again.stages.again):
                    assert_same(program, again.split(source.choice(batch.numbers)), leaves, rtol=1e-9)
        assert found or seed in MORE
