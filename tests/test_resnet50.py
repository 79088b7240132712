"""The main job: a whole ResNet-50 training step, by the compilers' own figures and by its values."""

import warnings

import jax
import numpy as np
import pytest

import remat_opt
from benchmarks.compiled_memory import measure_variant
from remat_opt.examples import image_classifier

MB = 10**6

pytestmark = pytest.mark.xdist_group("resnet50")


@pytest.fixture(scope="module")
def example():
    return image_classifier("resnet50", batch=8, size=128, learning_rate=0.01)


@pytest.fixture(scope="module")
def steps(example):
    """The plain step and the optimised one, by what is donated: each is planned once."""
    return {
        donate: (
            jax.jit(example.train_step, donate_argnums=donate),
            remat_opt.optimize(example.train_step, donate_argnums=donate),
        )
        for donate in ((), (0,))
    }


def temp_bytes(jitted, example) -> int:
    return jitted.lower(*example.abstract_args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("donate", [(), (0,)])
def test_the_cpu_step_takes_a_third_of_the_memory_and_less_than_blocks_by_hand(example, steps, donate) -> None:
    plain, ours = (temp_bytes(step, example) for step in steps[donate])
    by_hand = image_classifier("resnet50", batch=8, size=128, remat=True)
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    hand = temp_bytes(jax.jit(by_hand.train_step, donate_argnums=donate, compiler_options=options), by_hand)
    assert ours <= 0.34 * plain
    assert ours < hand
    assert ours < 109 * MB


def test_the_cpu_step_computes_the_same_bits_for_three_steps(example, steps) -> None:
    batch = example.batch()
    states = []
    for step in steps[()]:
        state, losses = example.init(), []
        for _ in range(3):
            state, loss = step(state, *batch)
            losses.append(loss)
        states.append(jax.tree.leaves((state, losses)))
    assert len(states[0]) > 400
    for plain, ours in zip(*states, strict=True):
        np.testing.assert_array_equal(plain, ours)


def test_an_h200_needs_less_than_a_third() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_opt.RematWarning)  # the plan is for a device that is not here
        figures = {
            variant: measure_variant("resnet50", variant, batch=64, size=224, target="h200")
            for variant in ("plain", "nn.remat", "remat_opt")
        }
    assert figures["remat_opt"].temp_bytes <= 1350 * MB
    assert figures["remat_opt"].temp_bytes <= figures["plain"].temp_bytes / 3
    assert figures["remat_opt"].temp_bytes < figures["nn.remat"].temp_bytes
