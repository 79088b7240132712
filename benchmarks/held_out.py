"""`NETWORKS`: training steps that no rule of the memory model was made on; `predicted_memory` measures them as others.

They were written after the rules, from what is common and not in `remat_opt.examples` or the tests. One that teaches a
rule stays here, and is told as what it then is in the commit that adds the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

CLASSES = 1000


class HeldOut(NamedTuple):
    """A step that donates its first two arguments, parameters and optimiser state; nothing is allocated."""

    step: Callable[..., Any]
    abstract_args: tuple


def step_of(network: nn.Module, inputs: jax.ShapeDtypeStruct, loss: Callable, optimizer: Any = None) -> HeldOut:
    """The usual step of a network; `loss` has what the network gives and the inputs. SGD with momentum by default."""
    chosen = optimizer or optax.sgd(0.1, momentum=0.9)
    params = jax.eval_shape(network.init, jax.random.key(0), inputs)

    def step(params: Any, state: Any, inputs: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda params: loss(network.apply(params, inputs), inputs))(params)
        updates, state = chosen.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return HeldOut(step, (params, jax.eval_shape(chosen.init, params), inputs))


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def first_class(logits: jax.Array, _: jax.Array) -> jax.Array:
    """As if every example were of the first class."""
    return -nn.log_softmax(logits)[..., 0].mean()


def next_token(logits: jax.Array, read: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], read[:, 1:]).mean()


def rebuilt(made: jax.Array, inputs: jax.Array) -> jax.Array:
    return ((made - inputs) ** 2).mean()


class DenseChain(nn.Module):
    """Dense layers of one width."""

    width: int
    depth: int
    activation: Callable = jnp.tanh
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.depth):
            x = self.activation(nn.Dense(self.width, use_bias=self.use_bias)(x))
        return x


class ResidualDense(nn.Module):
    """Pre-normalised residual blocks of dense layers with dropout left out, as for tables."""

    width: int = 256
    depth: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width)(x)
        for _ in range(self.depth):
            y = nn.Dense(2 * self.width)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.relu(y))
        return nn.Dense(10)(nn.relu(nn.LayerNorm()(x)))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    features: int = 384
    depth: int = 8

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.features, (16, 16), (16, 16))(images)
        x = x.reshape(x.shape[0], -1, self.features)
        for _ in range(self.depth):
            y = nn.LayerNorm()(x).swapaxes(1, 2)
            x = x + nn.Dense(x.shape[1])(nn.gelu(nn.Dense(256)(y))).swapaxes(1, 2)
            x = x + nn.Dense(self.features)(nn.gelu(nn.Dense(4 * self.features)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(x.mean(1))


class GatedTransformer(nn.Module):
    """Causal attention of few keys for many queries, and gated dense layers."""

    features: int = 512
    heads: int = 8
    key_heads: int = 2
    depth: int = 6
    words: int = 8000

    @nn.compact
    def __call__(self, read: jax.Array) -> jax.Array:
        x = nn.Embed(self.words, self.features)(read)
        size = self.features // self.heads
        mask = jnp.tril(jnp.ones((read.shape[1],) * 2, bool))
        for _ in range(self.depth):
            y = nn.RMSNorm()(x)
            queries = nn.DenseGeneral((self.key_heads, self.heads // self.key_heads, size), use_bias=False)(y)
            keys, values = (nn.DenseGeneral((self.key_heads, size), use_bias=False)(y) for _ in range(2))
            scores = jnp.einsum("bqkhd,bskd->bkhqs", queries, keys) / size**0.5
            attended = jnp.einsum("bkhqs,bskd->bqkhd", nn.softmax(jnp.where(mask, scores, -1e9)), values)
            x = x + nn.DenseGeneral(self.features, (-3, -2, -1), use_bias=False)(attended)
            y = nn.RMSNorm()(x)
            gate, up = (nn.Dense(1408, use_bias=False)(y) for _ in range(2))
            x = x + nn.Dense(self.features, use_bias=False)(nn.silu(gate) * up)
        return nn.Dense(self.words)(nn.RMSNorm()(x))


class SqueezeExcite(nn.Module):
    """Inverted bottlenecks with squeeze-and-excitation and group normalisation."""

    stages: tuple[tuple[int, int], ...] = ((32, 1), (48, 2), (48, 1), (96, 2), (96, 1), (96, 1), (192, 2), (192, 1))

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3), (2, 2))(images)
        for features, stride in self.stages:
            wide = 4 * features
            y = nn.swish(nn.GroupNorm(8)(nn.Conv(wide, (1, 1))(x)))
            y = nn.Conv(wide, (3, 3), (stride, stride), feature_group_count=wide)(y)
            y = nn.swish(nn.GroupNorm(8)(y))
            gate = nn.sigmoid(nn.Dense(wide)(nn.swish(nn.Dense(features)(y.mean((1, 2))))))
            y = nn.GroupNorm(8)(nn.Conv(features, (1, 1))(y * gate[:, None, None]))
            x = x + y if y.shape == x.shape else y
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class ConvNeXt(nn.Module):
    """ConvNeXt (Liu et al. 2022), smaller."""

    stages: tuple[tuple[int, int], ...] = ((96, 2), (192, 2), (384, 4))

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.LayerNorm()(nn.Conv(self.stages[0][0], (4, 4), (4, 4))(images))
        for number, (features, depth) in enumerate(self.stages):
            if number:
                x = nn.Conv(features, (2, 2), (2, 2))(nn.LayerNorm()(x))
            for _ in range(depth):
                y = nn.LayerNorm()(nn.Conv(features, (7, 7), feature_group_count=features)(x))
                x = x + nn.Dense(features)(nn.gelu(nn.Dense(4 * features)(y)))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x.mean((1, 2))))


class Autoencoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    features: tuple[int, ...] = (32, 64, 128, 256)

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for count in self.features:
            x = nn.relu(nn.Conv(count, (3, 3))(nn.relu(nn.Conv(count, (3, 3), (2, 2))(x))))
        for count in reversed(self.features):
            x = nn.relu(nn.Conv(count, (3, 3))(nn.relu(nn.ConvTranspose(count, (3, 3), (2, 2))(x))))
        return nn.Conv(images.shape[-1], (3, 3))(x)


class Recurrent(nn.Module):
    """Two layers of gated recurrent units over a text."""

    features: int = 256
    words: int = 5000

    @nn.compact
    def __call__(self, read: jax.Array) -> jax.Array:
        x = nn.Embed(self.words, self.features)(read)
        for _ in range(2):
            x = nn.RNN(nn.GRUCell(self.features))(x)
        return nn.Dense(self.words)(x)


class GraphConvolution(nn.Module):
    """Messages along the edges of a ring with chords, gathered and summed (Kipf & Welling 2017), residual."""

    features: int = 128
    depth: int = 6

    @nn.compact
    def __call__(self, nodes: jax.Array) -> jax.Array:
        count = nodes.shape[0]
        here = jnp.arange(count)
        senders = jnp.concatenate([here] * 4)
        receivers = jnp.concatenate([(here * factor + 1) % count for factor in (1, 3, 5, 7)])
        x = nn.Dense(self.features)(nodes)
        for _ in range(self.depth):
            messages = nn.relu(nn.Dense(self.features)(x))[senders]
            summed = jax.ops.segment_sum(messages, receivers, count)
            x = nn.LayerNorm()(x + nn.Dense(self.features)(summed))
        return nn.Dense(40)(x)


class TwoTowers(nn.Module):
    """Two images of everything, told apart from the others' (van den Oord et al. 2018)."""

    features: int = 256

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        tower = nn.Sequential(
            [
                *(
                    layer
                    for count in (64, 128, 256)
                    for layer in (nn.Conv(count, (3, 3), (2, 2)), nn.GroupNorm(8), nn.relu)
                ),
                lambda x: x.mean((1, 2)),
                nn.Dense(self.features),
            ]
        )
        first, second = (
            x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (tower(images), tower(images[:, ::-1]))
        )
        return first @ second.T / 0.1


def same_image(scores: jax.Array, _: jax.Array) -> jax.Array:
    return -jnp.diagonal(nn.log_softmax(scores)).mean()


NETWORKS: dict[str, Callable[[], HeldOut]] = {
    "dense_tanh": lambda: step_of(DenseChain(128, 12), floats(8192, 128), rebuilt),
    "dense_relu_adam": lambda: step_of(
        DenseChain(512, 6, nn.relu, True), floats(16384, 512), rebuilt, optax.adam(1e-3)
    ),
    "dense_wide": lambda: step_of(DenseChain(4096, 5, nn.gelu, True), floats(2048, 4096), rebuilt),
    "dense_deep": lambda: step_of(DenseChain(64, 60, nn.silu, True), floats(4096, 64), rebuilt),
    "residual_dense": lambda: step_of(ResidualDense(), floats(8192, 64), first_class, optax.adamw(1e-3)),
    "mixer": lambda: step_of(Mixer(), floats(64, 224, 224, 3), first_class),
    "gated_transformer": lambda: step_of(GatedTransformer(), tokens(8, 512), next_token, optax.adamw(1e-3)),
    "squeeze_excite": lambda: step_of(SqueezeExcite(), floats(64, 160, 160, 3), first_class),
    "convnext": lambda: step_of(ConvNeXt(), floats(32, 128, 128, 3), first_class, optax.adamw(1e-3)),
    "autoencoder": lambda: step_of(Autoencoder(), floats(64, 128, 128, 3), rebuilt),
    "recurrent": lambda: step_of(Recurrent(), tokens(32, 128), next_token, optax.adam(1e-3)),
    "graph_convolution": lambda: step_of(GraphConvolution(), floats(65536, 64), first_class),
    "two_towers": lambda: step_of(TwoTowers(), floats(256, 64, 64, 3), same_image),
}
