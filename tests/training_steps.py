"""`STEPS`: small training steps, written in the many ways users write them, that every stage is tested on.

In all of them the activations outweigh parameters and optimizer state, and the plain step takes 5 to 100 MB of
temporary memory on the CPU. Those built by `jax.jit`, `nnx.jit` or `eqx.filter_jit` come with that wrapper on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import step_networks as networks
from flax import nnx

Params = Any
Loss = Callable[..., jax.Array]

BATCH = 2048
WIDTH = 128
INPUTS, OUTPUTS = 32, 8


@dataclass(frozen=True)
class StepCase:
    """`step(*make_args(), **make_kwargs())` is one training step; `flat` if its jaxpr has no loop.

    `make_args` may take sizes: those of `SMALLER`.
    """

    name: str
    step: Callable[..., Any]
    make_args: Callable[..., tuple]
    flat: bool = True
    make_kwargs: Callable[[], dict[str, Any]] = field(default=dict)


class State(NamedTuple):
    """Parameters and the optimizer's state."""

    params: Params
    opt_state: optax.OptState


def start(params: Params, optimizer: optax.GradientTransformation) -> State:
    return State(params, optimizer.init(params))


def apply_gradients(state: State, grads: Params, optimizer: optax.GradientTransformation) -> State:
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    return State(optax.apply_updates(state.params, updates), opt_state)


def step_of(loss: Loss, optimizer: optax.GradientTransformation) -> Callable[..., tuple[State, jax.Array]]:
    """The usual step: `(state, *batch) -> (state, loss)` for a `loss(params, *batch)`."""

    def step(state: State, *batch: jax.Array) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, *batch)
        return apply_gradients(state, grads, optimizer), value

    return step


def squared_error(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((predictions - targets) ** 2)


def vectors(rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Inputs (batch, 32) and targets (batch, 8)."""
    inputs = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
    return jnp.asarray(inputs), jnp.asarray(np.sin(inputs[:, :OUTPUTS]))


def mlp_args(optimizer: optax.GradientTransformation, hidden_layers: int = 12) -> tuple:
    rng = np.random.default_rng(0)
    sizes = [INPUTS, *[WIDTH] * hidden_layers, OUTPUTS]
    return start(networks.mlp_params(rng, sizes), optimizer), *vectors(rng)


def transformer_args(optimizer: optax.GradientTransformation, batch: int = 16, layers: int = 6) -> tuple:
    """State and tokens (batch, 64)."""
    rng = np.random.default_rng(0)
    params = networks.transformer_params(rng, width=64, layers=layers, vocabulary=128, time=64)
    return start(params, optimizer), jnp.asarray(rng.integers(0, 128, (batch, 64)), jnp.int32)


def mlp_case() -> StepCase:
    """A deep tanh network in a plain function."""
    optimizer = optax.adam(1e-3)
    step = step_of(lambda params, x, y: squared_error(networks.mlp(params, x), y), optimizer)
    return StepCase("mlp", step, partial(mlp_args, optimizer, hidden_layers=24))


def conv_net_case() -> StepCase:
    """Residual blocks with batch norm, running statistics in the state, jitted with donation."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(state: State, stats: Params, images: jax.Array, labels: jax.Array) -> tuple[State, Params, jax.Array]:
        def loss(params: Params) -> tuple[jax.Array, Params]:
            logits, running = networks.conv_net(params, stats, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), running

        (value, running), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return apply_gradients(state, grads, optimizer), running, value

    def make_args(blocks: int = 6) -> tuple:
        rng = np.random.default_rng(0)
        params, stats = networks.conv_net_params(rng, width=16, blocks=blocks, classes=10)
        images = jnp.asarray(rng.normal(size=(16, 24, 24, 3)), jnp.float32)
        return start(params, optimizer), stats, images, jnp.asarray(rng.integers(0, 10, 16), jnp.int32)

    return StepCase("conv_net", step, make_args)


def u_net_case() -> StepCase:
    """Image to image with long skips."""
    optimizer = optax.adam(1e-3)
    step = step_of(lambda params, x, y: squared_error(networks.u_net(params, x), y), optimizer)

    def make_args() -> tuple:
        rng = np.random.default_rng(0)
        images = jnp.asarray(rng.normal(size=(8, 48, 48, 1)), jnp.float32)
        return start(networks.u_net_params(rng, width=8, levels=3), optimizer), images, jnp.abs(images)

    return StepCase("u_net", step, make_args)


def gan_case() -> StepCase:
    """Goodfellow et al., arXiv 1406.2661: the discriminator's update, then the generator's against it."""
    optimizer = optax.adam(1e-3, b1=0.5)

    def discriminator_loss(discriminator: Params, fake: jax.Array, real: jax.Array) -> jax.Array:
        scores = networks.mlp(discriminator, fake, jax.nn.gelu), networks.mlp(discriminator, real, jax.nn.gelu)
        return jnp.mean(jax.nn.softplus(scores[0])) + jnp.mean(jax.nn.softplus(-scores[1]))

    def generator_loss(generator: Params, discriminator: Params, noise: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.softplus(-networks.mlp(discriminator, networks.mlp(generator, noise), jax.nn.gelu)))

    def step(generator: State, discriminator: State, noise: jax.Array, real: jax.Array) -> tuple:
        fake = networks.mlp(generator.params, noise)
        loss, grads = jax.value_and_grad(discriminator_loss)(discriminator.params, fake, real)
        discriminator = apply_gradients(discriminator, grads, optimizer)
        fooling, grads = jax.value_and_grad(generator_loss)(generator.params, discriminator.params, noise)
        return apply_gradients(generator, grads, optimizer), discriminator, (loss, fooling)

    def make_args(hidden_layers: int = 8) -> tuple:
        rng = np.random.default_rng(0)
        sizes = [[32, *[WIDTH] * hidden_layers, 16], [16, *[WIDTH] * hidden_layers, 1]]
        states = (start(networks.mlp_params(rng, layers), optimizer) for layers in sizes)
        noise, real = vectors(rng)
        return *states, noise, jnp.tile(real, 2)

    return StepCase("gan", step, make_args)


def transformer_case(name: str = "transformer", block: Callable = networks.transformer_block) -> StepCase:
    """Unrolled blocks with AdamW."""
    optimizer = optax.adamw(1e-3)

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        return networks.next_token_loss(networks.transformer(params, tokens, block=block), tokens)

    return StepCase(name, step_of(loss, optimizer), partial(transformer_args, optimizer))


def dropout_case() -> StepCase:
    """The transformer with dropout; the key is part of the state and is split by each step."""
    optimizer = optax.adamw(1e-3)

    def step(state: State, key: jax.Array, tokens: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        key, dropout_key = jax.random.split(key)

        def loss(params: Params) -> jax.Array:
            return networks.next_token_loss(networks.transformer(params, tokens, dropout_key), tokens)

        value, grads = jax.value_and_grad(loss)(state.params)
        return apply_gradients(state, grads, optimizer), key, value

    def make_args(**sizes: int) -> tuple:
        state, tokens = transformer_args(optimizer, **sizes)
        return state, jax.random.key(0), tokens

    return StepCase("dropout", step, make_args)


class NnxNet(nnx.Module):
    """Dense layers with batch norm and dropout: (batch, 32) → (batch, 8)."""

    def __init__(self, rngs: nnx.Rngs, hidden_layers: int) -> None:
        self.first = nnx.Linear(INPUTS, WIDTH, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(hidden_layers)])
        self.norms = nnx.List([nnx.BatchNorm(WIDTH, rngs=rngs) for _ in range(hidden_layers)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(WIDTH, OUTPUTS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for layer, norm in zip(self.hidden, self.norms, strict=True):
            x = x + nnx.gelu(norm(layer(x)))
        return self.last(self.dropout(x))


def nnx_step(model: NnxNet, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    """Changes the model and the optimizer in place and returns the loss."""
    loss, grads = nnx.value_and_grad(lambda model: squared_error(model(x), y))(model)
    optimizer.update(model, grads)
    return loss


def nnx_args(hidden_layers: int = 8) -> tuple:
    model = NnxNet(nnx.Rngs(0), hidden_layers)
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), *vectors(np.random.default_rng(0))


def equinox_case() -> StepCase:
    """A module whose leaves include functions, under `eqx.filter_jit`."""
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model: eqx.Module, opt_state: optax.OptState, x: jax.Array, y: jax.Array) -> tuple:
        loss, grads = eqx.filter_value_and_grad(lambda model: squared_error(jax.vmap(model)(x), y))(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def make_args(hidden_layers: int = 12) -> tuple:
        model = eqx.nn.MLP(INPUTS, OUTPUTS, WIDTH, depth=hidden_layers, activation=jax.nn.gelu, key=jax.random.key(0))
        return model, optimizer.init(eqx.filter(model, eqx.is_array)), *vectors(np.random.default_rng(0))

    return StepCase("equinox", step, make_args)


def vjp_case() -> StepCase:
    """`jax.vjp` by hand and a hand-written gradient descent."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        predictions, pull_back = jax.vjp(lambda params: networks.mlp(params, x, jax.nn.silu), params)
        (grads,) = pull_back(2 * (predictions - y) / y.size)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), squared_error(predictions, y)

    def make_args(hidden_layers: int = 12) -> tuple:
        state, x, y = mlp_args(optax.identity(), hidden_layers)
        return state.params, x, y

    return StepCase("vjp", step, make_args)


def random_wiring_case() -> StepCase:
    optimizer = optax.adam(1e-3)

    def wiring(nodes: int) -> list[list[int]]:
        return networks.random_wiring(np.random.default_rng(3), nodes)

    def loss(params: Params, x: jax.Array) -> jax.Array:
        return squared_error(networks.randomly_wired(params, wiring(len(params)), x), jnp.sin(x))

    step = step_of(loss, optimizer)

    def make_args(nodes: int = 20) -> tuple:
        rng = np.random.default_rng(0)
        dense = partial(networks.dense_params, rng, WIDTH, WIDTH)
        params = [{"gates": jnp.zeros(len(inputs)), "dense": dense()} for inputs in wiring(nodes)]
        return start(params, optimizer), jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)

    return StepCase("random_wiring", step, make_args)


def has_aux_case() -> StepCase:
    """The loss hands out metrics and predictions on the side."""
    optimizer = optax.adam(1e-3)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        predictions = networks.mlp(params, x, jax.nn.gelu)
        return squared_error(predictions, y), {"predictions": predictions, "worst": jnp.max(jnp.abs(predictions - y))}

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array, dict[str, jax.Array]]:
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params, x, y)
        return apply_gradients(state, grads, optimizer), value, metrics

    return StepCase("has_aux", step, partial(mlp_args, optimizer))


def mixed_precision_case() -> StepCase:
    """float32 parameters, bfloat16 computation, a constant loss scale (Micikevicius et al., arXiv 1710.03740)."""
    optimizer = optax.adam(1e-3)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        predictions = networks.mlp(networks.half_precision(params), x.astype(jnp.bfloat16), jax.nn.gelu)
        return 128.0 * squared_error(predictions.astype(jnp.float32), y)

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, x, y)
        return apply_gradients(state, jax.tree.map(lambda g: g / 128.0, grads), optimizer), value / 128.0

    return StepCase("mixed_precision", step, partial(mlp_args, optimizer))


def keyword_and_static_case() -> StepCase:
    """A static argument by position, another by keyword, and arrays by keyword."""
    optimizer = optax.sgd(0.1)

    @partial(jax.jit, static_argnums=(1,), static_argnames=("normalise",), donate_argnums=(0,))
    def step(state: State, activation: str, x: jax.Array, *, targets: jax.Array, normalise: bool = False) -> tuple:
        def loss(params: Params) -> jax.Array:
            error = squared_error(networks.mlp(params, x, getattr(jax.nn, activation)), targets)
            return error / jnp.var(targets) if normalise else error

        value, grads = jax.value_and_grad(loss)(state.params)
        return apply_gradients(state, grads, optimizer), value

    def make_args(hidden_layers: int = 12) -> tuple:
        state, x, _ = mlp_args(optimizer, hidden_layers)
        return state, "gelu", x

    def make_kwargs() -> dict[str, Any]:
        return {"targets": mlp_args(optimizer)[2], "normalise": True}

    return StepCase("keyword_and_static", step, make_args, make_kwargs=make_kwargs)


def micro_batches_case() -> StepCase:
    """Gradients of two micro-batches, added up without a loop."""
    optimizer = optax.adam(1e-3)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return squared_error(networks.mlp(params, x, jax.nn.gelu), y)

    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
        total, sums = 0.0, jax.tree.map(jnp.zeros_like, state.params)
        for micro_x, micro_y in zip(jnp.split(x, 2), jnp.split(y, 2), strict=True):
            value, grads = jax.value_and_grad(loss)(state.params, micro_x, micro_y)
            total, sums = total + value / 2, jax.tree.map(lambda s, g: s + g / 2, sums, grads)
        return apply_gradients(state, sums, optimizer), total

    return StepCase("micro_batches", step, partial(mlp_args, optimizer))


CHECKPOINTED = jax.checkpoint(networks.transformer_block)
WITH_A_POLICY = jax.checkpoint(
    networks.transformer_block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
)
BY_HAND = partial(networks.transformer_block, attention=networks.hand_written_attention)

STEPS: dict[str, Callable[[], StepCase]] = {
    "mlp": mlp_case,
    "conv_net": conv_net_case,
    "u_net": u_net_case,
    "gan": gan_case,
    "transformer": transformer_case,
    "dropout": dropout_case,
    "nnx": lambda: StepCase("nnx", nnx_step, nnx_args),  # only `nnx.jit` would carry its updates out
    "nnx_jit": lambda: StepCase("nnx_jit", nnx.jit(nnx_step), nnx_args),
    "equinox": equinox_case,
    "vjp": vjp_case,
    "checkpoint_blocks": partial(transformer_case, "checkpoint_blocks", CHECKPOINTED),
    "checkpoint_policy": partial(transformer_case, "checkpoint_policy", WITH_A_POLICY),
    "hand_written_attention": partial(transformer_case, "hand_written_attention", BY_HAND),
    "random_wiring": random_wiring_case,
    "has_aux": has_aux_case,
    "mixed_precision": mixed_precision_case,
    "keyword_and_static": keyword_and_static_case,
    "micro_batches": micro_batches_case,
}

TRANSFORMERS = ("transformer", "dropout", "checkpoint_blocks", "checkpoint_policy", "hand_written_attention")
# Sizes at which a test sees the same, sooner; the benchmarks keep figures of the full ones.
SMALLER: dict[str, dict[str, int]] = {
    **{name: {"layers": 2, "batch": 8} for name in TRANSFORMERS},
    "mlp": {"hidden_layers": 8},
    "gan": {"hidden_layers": 3},
    "nnx": {"hidden_layers": 4},
    "nnx_jit": {"hidden_layers": 4},
    "equinox": {"hidden_layers": 6},
    "vjp": {"hidden_layers": 6},
    "has_aux": {"hidden_layers": 6},
    "random_wiring": {"nodes": 9},
    "mixed_precision": {"hidden_layers": 6},
    "micro_batches": {"hidden_layers": 6},
    "keyword_and_static": {"hidden_layers": 6},
    "conv_net": {"blocks": 3},
}


def smaller_case(name: str) -> StepCase:
    """A case of `STEPS` at the size of `SMALLER`."""
    case = STEPS[name]()
    return replace(case, make_args=partial(case.make_args, **SMALLER.get(name, {})))
