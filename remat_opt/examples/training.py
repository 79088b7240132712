"""Whole training steps of the example networks, for the demo, the tests and the benchmarks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from remat_opt.examples.unet import centre


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


TrainStep = Callable[[TrainState, Any, jax.Array], tuple[TrainState, jax.Array]]
MakeBatch = Callable[[jax.Array], tuple[Any, jax.Array]]


@dataclass(frozen=True)
class TrainingExample:
    """A training step with what is needed to compile it (`abstract_args`) or to run it (`init`, `batch`)."""

    name: str
    train_step: TrainStep
    abstract_args: tuple[Any, Any, jax.ShapeDtypeStruct]
    init_state: Callable[[jax.Array], TrainState]
    make_batch: MakeBatch
    donate_argnums: tuple[int, ...] = (0,)

    def init(self, seed: int = 0) -> TrainState:
        """A fresh training state."""
        # It runs once, and a network has hundreds of random generators: compiled plainly, it is there much sooner.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self.init_state, compiler_options=options)(jax.random.key(seed))

    def batch(self, seed: int = 0) -> tuple[Any, jax.Array]:
        """Generated inputs and labels, shaped as in `abstract_args`: the same task for every seed."""
        return self.make_batch(jax.random.key(seed))


def training_example(
    name: str,
    network: nn.Module,
    make_batch: MakeBatch,
    make_small_batch: MakeBatch,
    learning_rate: float | None = None,
) -> TrainingExample:
    """The training step of a network: cross entropy, SGD with momentum. Nothing is allocated.

    Args:
        name: what to call it.
        network: called as `network(inputs, train)`, gives logits (…, classes) for labels (…). One whose class says
            `takes_labels` is called with (inputs, labels) and gives the loss.
        make_batch: (inputs, labels) from a key.
        make_small_batch: the same with as few examples as make parameters of the same shapes; they are initialised
            with it.
        learning_rate: by default the image networks' papers', 0.1 with batch norm, 0.01 without.
    """
    key = jax.random.key(0)
    if learning_rate is None:
        variables = jax.eval_shape(lambda key: _initial(network, make_small_batch, key), key)
        learning_rate = 0.1 if "batch_stats" in variables else 0.01
    optimizer = optax.sgd(learning_rate, momentum=0.9)

    def init_state(key: jax.Array) -> TrainState:
        params_key, dropout_key = jax.random.split(key)
        variables = _initial(network, make_small_batch, params_key)
        params = variables["params"]
        has_dropout = getattr(network, "dropout_rate", 0.0) > 0
        dropout = Dropout(dropout_key, jnp.zeros((), jnp.int32)) if has_dropout else None
        return TrainState(params, variables.get("batch_stats", {}), optimizer.init(params), dropout)

    abstract_args = (jax.eval_shape(init_state, key), *jax.eval_shape(make_batch, key))
    return TrainingExample(name, _train_step(network, optimizer), abstract_args, init_state, make_batch)


def _initial(network: nn.Module, make_batch: MakeBatch, key: jax.Array) -> Any:
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(make_batch, key))
    return network.init(key, zeros if takes_labels(network) else zeros[0], train=False)


def takes_labels(network: nn.Module) -> bool:
    """Whether the network computes its loss itself."""
    return getattr(network, "takes_labels", False)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels; a border of pixels for which there are no logits does not count."""
    if labels.ndim == 3:
        labels = centre(labels, *logits.shape[1:3])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _train_step(network: nn.Module, optimizer: optax.GradientTransformation) -> TrainStep:
    def train_step(state: TrainState, inputs: Any, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        dropout = state.dropout
        rngs = {} if dropout is None else {"dropout": jax.random.fold_in(dropout.key, dropout.step)}

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state.batch_stats}
            read = (inputs, labels) if takes_labels(network) else inputs
            outputs, updates = network.apply(variables, read, True, rngs=rngs, mutable=["batch_stats"])
            loss = outputs if takes_labels(network) else cross_entropy(outputs, labels)
            return loss, updates.get("batch_stats", {})

        (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if dropout is not None:
            dropout = Dropout(dropout.key, dropout.step + 1)
        return TrainState(params, batch_stats, opt_state, dropout), loss

    return train_step
