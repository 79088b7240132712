"""Networks that translate: an encoder, and a decoder that looks at it, with attention or with convolutions inside.

Vaswani et al., "Attention Is All You Need", arXiv 1706.03762, and Wu et al., "Pay Less Attention with Lightweight and
Dynamic Convolutions", arXiv 1901.10430. Layer norm comes after each addition. Sequences are full: there is no padding
to be masked. Sequences inside are (batch, time, width).
"""

from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from remat_opt.examples.transformer import Attention, FeedForward, layer_norm


class DynamicConv(nn.Module):
    """Convolution over time whose weights each place computes for itself (Wu et al., section 4).

    The channels of a head share the `kernel` weights, which a softmax normalises. `gated` puts a gated linear unit
    before. A causal one sees the `kernel` last places, else the places around.
    """

    kernel: int
    heads: int
    dropout_rate: float
    train: bool
    dtype: jnp.dtype
    causal: bool
    gated: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        y = nn.Dense(2 * width if self.gated else width, dtype=self.dtype, name="into")(x)
        y = nn.glu(y) if self.gated else y
        weights = nn.Dense(self.heads * self.kernel, use_bias=False, dtype=self.dtype, name="weights")(y)
        weights = nn.softmax(weights.reshape(batch, time, self.heads, self.kernel))
        weights = nn.Dropout(self.dropout_rate, deterministic=not self.train)(weights)
        band = banded(weights.transpose(0, 2, 1, 3), self.kernel - 1 if self.causal else self.kernel // 2)
        y = jnp.einsum("bhts,bshd->bthd", band, y.reshape(batch, time, self.heads, width // self.heads))
        return nn.Dense(width, dtype=self.dtype, name="out")(y.reshape(x.shape))


def banded(weights: jax.Array, before: int) -> jax.Array:
    """(…, time, kernel) → (…, time, time), with entry k of row t in column t + k - before; what is outside is lost."""
    *outer, time, kernel = weights.shape
    padded = jnp.pad(weights, [(0, 0)] * (len(outer) + 1) + [(0, time)])
    # Read again with rows that are one shorter, each row stands one place further right than the one above.
    flat = padded.reshape(*outer, time * (kernel + time))[..., : time * (kernel + time - 1)]
    return flat.reshape(*outer, time, kernel + time - 1)[..., before : before + time]


class Layer(nn.Module):
    """One layer of encoder or decoder: mixing over time, in a decoder attention to `memory`, feed-forward.

    `kernel` 0 mixes by attention, any other by a dynamic convolution.
    """

    kernel: int
    heads: int
    hidden: int
    dropout_rate: float
    train: bool
    dtype: jnp.dtype
    causal: bool
    gated: bool

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        shared = (self.heads, self.dropout_rate, self.train, self.dtype)
        if self.kernel:
            mixed = DynamicConv(self.kernel, *shared, self.causal, self.gated, name="convolution")(x)
        else:
            mixed = Attention(*shared, self.causal, name="attention")(x)
        x = self.joined(x, mixed, "mixing_norm")
        if memory is not None:
            x = self.joined(x, Attention(*shared, name="memory_attention")(x, memory), "memory_norm")
        feed_forward = FeedForward(self.hidden, self.dtype, relu=True, name="feed_forward")
        return self.joined(x, feed_forward(x), "feed_forward_norm")

    def joined(self, x: jax.Array, new: jax.Array, name: str) -> jax.Array:
        new = nn.Dropout(self.dropout_rate, deterministic=not self.train)(new)
        return layer_norm(self.dtype, name)(x + new)


class Translator(nn.Module):
    """(source tokens (batch, time), shifted target tokens (batch, time')) → logits (batch, time', num_classes).

    `encoder` and `decoder` give each layer's kernel, 0 for attention. The embedding of the target is also the last
    layer and, unless the source has `source_classes` of its own, that of the source. `remat` wraps every layer in
    `nn.remat`.
    """

    encoder: Sequence[int]
    decoder: Sequence[int]
    width: int = 512
    hidden: int = 2048
    heads: int = 8
    gated: bool = False
    dropout_rate: float = 0.1
    num_classes: int = 37000
    source_classes: int | None = None
    dtype: jnp.dtype = jnp.float32
    remat: bool = False

    @nn.compact
    def __call__(self, tokens: tuple[jax.Array, jax.Array], train: bool) -> jax.Array:
        source, target = tokens
        layer = nn.remat(Layer) if self.remat else Layer
        sizes = (self.heads, self.hidden, self.dropout_rate, train, self.dtype)
        embedding = into = self.embedding(self.num_classes, "embedding")
        if self.source_classes is not None:
            into = self.embedding(self.source_classes, "source_embedding")
        memory = self.placed(into(source), train)
        for index, kernel in enumerate(self.encoder):
            memory = layer(kernel, *sizes, False, self.gated, name=f"encoder{index + 1}")(memory)
        x = self.placed(embedding(target), train)
        for index, kernel in enumerate(self.decoder):
            x = layer(kernel, *sizes, True, self.gated, name=f"decoder{index + 1}")(x, memory)
        return embedding.attend(x)

    def embedding(self, classes: int, name: str) -> nn.Embed:
        initializer = nn.initializers.normal(self.width**-0.5)
        return nn.Embed(classes, self.width, dtype=self.dtype, embedding_init=initializer, name=name)

    def placed(self, x: jax.Array, train: bool) -> jax.Array:
        """Embedded tokens, scaled, with sines and cosines of their places added."""
        rates = 10000.0 ** -(np.arange(0, self.width, 2) / self.width)
        angles = np.arange(x.shape[1])[:, None] * rates
        places = jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], -1), self.dtype)
        return nn.Dropout(self.dropout_rate, deterministic=not train)(x * self.width**0.5 + places)


ENCODER_KERNELS, DECODER_KERNELS = (3, 7, 15, 31, 31, 31, 31), (3, 7, 15, 31, 31, 31)
_dynamic = partial(Translator, ENCODER_KERNELS, DECODER_KERNELS)
TRANSLATORS = {
    "dynamicconv_iwslt": partial(
        _dynamic, 512, 1024, 4, gated=False, dropout_rate=0.3, num_classes=6632, source_classes=8848
    ),
    "dynamicconv_wmt": partial(_dynamic, 1024, 4096, 16, gated=True, num_classes=32768),
    "transformer_base": partial(Translator, (0,) * 6, (0,) * 6),
    "transformer_big": partial(Translator, (0,) * 6, (0,) * 6, 1024, 4096, 16),
}
