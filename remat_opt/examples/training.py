"""Whole training steps of the image networks, for the demo, the tests and the benchmarks."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from remat_opt.examples.alexnet import ALEXNETS
from remat_opt.examples.densenet import DENSENETS
from remat_opt.examples.resnet import RESNETS
from remat_opt.examples.vgg import VGGS

NETWORKS: dict[str, Callable[..., nn.Module]] = {**RESNETS, **DENSENETS, **VGGS, **ALEXNETS}
"""Name → constructor taking `num_classes`, `dtype` and `remat`. A new family is one file and its table here."""


class Dropout(NamedTuple):
    """The key that every step folds its own number into."""

    key: jax.Array
    step: jax.Array


class TrainState(NamedTuple):
    """What one training step hands to the next; `batch_stats` is empty and `dropout` None in networks without."""

    params: Any
    batch_stats: Any
    opt_state: optax.OptState
    dropout: Dropout | None


TrainStep = Callable[[TrainState, jax.Array, jax.Array], tuple[TrainState, jax.Array]]


@dataclass(frozen=True)
class TrainingExample:
    """A training step with what is needed to compile it (`abstract_args`) or to run it (`init`, `batch`)."""

    name: str
    train_step: TrainStep
    abstract_args: tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    init_state: Callable[[jax.Array], TrainState]
    num_classes: int
    donate_argnums: tuple[int, ...] = (0,)

    def init(self, seed: int = 0) -> TrainState:
        """A fresh training state."""
        return jax.jit(self.init_state)(jax.random.key(seed))

    def batch(self, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Generated images (batch, size, size, 3) and labels (batch,): the same pattern per class for every seed."""
        images = self.abstract_args[1]
        return pattern_images(jax.random.key(seed), images.shape, images.dtype, self.num_classes)


@partial(jax.jit, static_argnums=(1, 2, 3))
def pattern_images(
    key: jax.Array, shape: tuple[int, int, int, int], dtype: jnp.dtype, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """Images that a network can learn to tell apart: a fixed coarse pattern for each class, and noise."""
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, shape[:1], 0, num_classes)
    patterns = jax.random.normal(jax.random.key(0), (num_classes, 4, 4, shape[-1]))
    images = jax.image.resize(patterns[labels], shape, "linear") + 0.5 * jax.random.normal(noise_key, shape)
    return images.astype(dtype), labels


def image_classifier(
    name: str,
    *,
    batch: int,
    size: int = 224,
    classes: int = 1000,
    remat: bool = False,
    dtype: jnp.dtype = jnp.float32,
    learning_rate: float | None = None,
    wrap: Callable[[type[nn.Module]], Callable[..., nn.Module]] | None = None,
) -> TrainingExample:
    """The training step of one of `NETWORKS` on images (batch, size, size, 3): cross entropy, SGD with momentum.

    Nothing is allocated. Parameters are float32 and `dtype` is that of the computation. `remat` wraps every block in
    `nn.remat` by hand; `wrap` gives the whole network's class another one. The default learning rate is the
    papers': 0.1 with batch norm, 0.01 without.
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; known are {', '.join(sorted(NETWORKS))}")
    network = NETWORKS[name](num_classes=classes, dtype=dtype, remat=remat)
    if wrap is not None:
        fields = (field.name for field in dataclasses.fields(network) if field.name not in ("parent", "name"))
        network = wrap(type(network))(**{field: getattr(network, field) for field in fields})
    images = jax.ShapeDtypeStruct((batch, size, size, 3), dtype)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if learning_rate is None:
        variables = jax.eval_shape(partial(network.init, train=False), jax.random.key(0), images)
        learning_rate = 0.1 if "batch_stats" in variables else 0.01
    optimizer = optax.sgd(learning_rate, momentum=0.9)
    init_state = _state_maker(network, optimizer, images.shape[1:], dtype)
    state = jax.eval_shape(init_state, jax.random.key(0))
    return TrainingExample(name, _train_step(network, optimizer), (state, images, labels), init_state, classes)


def _state_maker(
    network: nn.Module, optimizer: optax.GradientTransformation, image_shape: tuple[int, ...], dtype: jnp.dtype
) -> Callable[[jax.Array], TrainState]:
    def init_state(key: jax.Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        variables = network.init(params_key, jnp.zeros((1, *image_shape), dtype), train=False)
        params = variables["params"]
        has_dropout = getattr(network, "dropout_rate", 0.0) > 0
        dropout = Dropout(dropout_key, jnp.zeros((), jnp.int32)) if has_dropout else None
        return TrainState(params, variables.get("batch_stats", {}), optimizer.init(params), dropout)

    return init_state


def _train_step(network: nn.Module, optimizer: optax.GradientTransformation) -> TrainStep:
    def train_step(state: TrainState, images: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        dropout = state.dropout
        rngs = {} if dropout is None else {"dropout": jax.random.fold_in(dropout.key, dropout.step)}

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updates = network.apply(variables, images, True, rngs=rngs, mutable=["batch_stats"])
            logits = logits.astype(jnp.float32)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
            return loss, updates.get("batch_stats", {})

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if dropout is not None:
            dropout = Dropout(dropout.key, dropout.step + 1)
        return TrainState(params, batch_stats, opt_state, dropout), loss

    return train_step
