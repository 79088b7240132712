"""The example networks: published sizes, the hand-written remat twin, and that they learn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat_opt.examples import NETWORKS, TrainingExample, image_classifier

PUBLISHED_PARAMETERS = {  # torchvision's
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "alexnet": 61_100_840,
}


def parameter_count(name: str, size: int) -> int:
    network = NETWORKS[name]()
    images = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    variables = jax.eval_shape(lambda x: network.init(jax.random.key(0), x, False), images)
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def jitted(example: TrainingExample):
    return jax.jit(example.train_step, donate_argnums=example.donate_argnums)


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert parameter_count(name, 224) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", ["vgg11", "alexnet"])
@pytest.mark.parametrize("size", [64, 96, 256])
def test_the_classifier_fits_other_image_sizes(name: str, size: int) -> None:
    assert parameter_count(name, size) == PUBLISHED_PARAMETERS[name]


def test_an_unknown_network_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown network 'resnet51'.*densenet121.*resnet50"):
        image_classifier("resnet51", batch=2)


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "vgg11", "alexnet"])
def test_remat_by_hand_keeps_the_state_and_wraps_every_block(name: str) -> None:
    plain = image_classifier(name, batch=2, size=64, classes=4)
    remat = image_classifier(name, batch=2, size=64, classes=4, remat=True)
    assert jax.tree.structure(remat.abstract_args) == jax.tree.structure(plain.abstract_args)
    jaxpr = jax.make_jaxpr(remat.train_step)(*remat.abstract_args)
    checkpoints = sum("prevent_cse" in equation.params for equation in jaxpr.eqns)
    assert checkpoints == {"resnet18": 8, "densenet121": 58 + 3, "vgg11": 6, "alexnet": 4}[name]


@pytest.mark.parametrize("name", ["resnet18", "vgg11"])
def test_only_networks_with_dropout_carry_a_key(name: str) -> None:
    state, _, _ = image_classifier(name, batch=2, size=64, classes=4).abstract_args
    assert (state.dropout is None) == (name == "resnet18")
    assert bool(state.batch_stats) == (name == "resnet18")


def test_remat_by_hand_computes_the_same_loss() -> None:
    plain = image_classifier("resnet18", batch=2, size=64, classes=4)
    remat = image_classifier("resnet18", batch=2, size=64, classes=4, remat=True)
    state, batch = plain.init(), plain.batch()
    _, loss = jitted(remat)(jax.tree.map(jnp.copy, state), *batch)
    _, expected = jitted(plain)(state, *batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_losses_fall() -> None:
    example = image_classifier("resnet18", batch=8, size=32, classes=4, learning_rate=0.01)
    state, step = example.init(), jitted(example)
    losses = []
    for seed in range(12):
        state, loss = step(state, *example.batch(seed))
        losses.append(float(loss))
    assert np.isfinite(losses).all()
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) / 2
