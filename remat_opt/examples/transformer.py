"""Transformer blocks, and stacks of them as a Python loop or as one `scan`: what GPT, ViT and translation share.

Vaswani et al., "Attention Is All You Need", arXiv 1706.03762. Sequences are (batch, time, width).
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp

narrow_normal = nn.initializers.normal(0.02)  # Radford et al., GPT


class Attention(nn.Module):
    """Multi-head attention of `x` to itself or to `memory`: (batch, time, width) → (batch, time, width).

    `causal` hides what comes later in `x`. The weights are normalised in float32 and dropped out. `flash` takes JAX's
    Pallas kernel for GPUs, which keeps no weights (Dao et al., "FlashAttention", arXiv 2205.14135) and drops none.
    """

    heads: int
    dropout_rate: float
    train: bool
    dtype: jnp.dtype
    causal: bool = False
    flash: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None = None) -> jax.Array:
        width = x.shape[-1]
        if memory is None:
            projected = nn.Dense(3 * width, dtype=self.dtype, kernel_init=narrow_normal, name="query_key_value")(x)
            query, key, value = jnp.split(projected, 3, -1)
        else:
            query = nn.Dense(width, dtype=self.dtype, kernel_init=narrow_normal, name="query")(x)
            projected = nn.Dense(2 * width, dtype=self.dtype, kernel_init=narrow_normal, name="key_value")(memory)
            key, value = jnp.split(projected, 2, -1)
        query, key, value = (y.reshape(*y.shape[:2], self.heads, width // self.heads) for y in (query, key, value))
        if self.flash:
            mixed = flash_attention(query, key, value, self.causal).reshape(x.shape)
            return nn.Dense(width, dtype=self.dtype, kernel_init=narrow_normal, name="out")(mixed)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / (width // self.heads) ** 0.5
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        weights = nn.softmax(scores).astype(self.dtype)
        weights = nn.Dropout(self.dropout_rate, deterministic=not self.train)(weights)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        return nn.Dense(width, dtype=self.dtype, kernel_init=narrow_normal, name="out")(mixed)


def flash_attention(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool) -> jax.Array:
    """The mixed values of all heads, (batch, time, heads, width of a head), as of the other three."""
    with warnings.catch_warnings():
        # jax 0.12 refers to another library (tokamax); for an example JAX's own kernel does as long as it is there.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.attention import mha

        return mha(query, key, value, segment_ids=None, sm_scale=query.shape[-1] ** -0.5, causal=causal)


class FeedForward(nn.Module):
    """Two dense layers with gelu or relu between them, at each place: (batch, time, width) → (batch, time, width)."""

    hidden: int
    dtype: jnp.dtype
    relu: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=narrow_normal, name="up")(x)
        y = nn.relu(y) if self.relu else nn.gelu(y)
        return nn.Dense(x.shape[-1], dtype=self.dtype, kernel_init=narrow_normal, name="down")(y)


class Block(nn.Module):
    """Attention, then feed-forward, each after layer norm and added to its input: (batch, time, width) → the same."""

    heads: int
    hidden: int
    dropout_rate: float
    train: bool
    dtype: jnp.dtype
    causal: bool
    flash: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        fields = (self.heads, self.dropout_rate, self.train, self.dtype, self.causal, self.flash)
        y = Attention(*fields, name="attention")(layer_norm(self.dtype, "attention_norm")(x))
        x = x + nn.Dropout(self.dropout_rate, deterministic=not self.train)(y)
        feed_forward = FeedForward(self.hidden, self.dtype, name="feed_forward")
        y = feed_forward(layer_norm(self.dtype, "feed_forward_norm")(x))
        return x + nn.Dropout(self.dropout_rate, deterministic=not self.train)(y)


class Stack(nn.Module):
    """Equal blocks one after the other: (batch, time, width) → the same.

    `scan` makes the layers one loop over stacked parameters, instead of a Python loop that is unrolled while tracing.
    `remat` wraps every block in `nn.remat`.
    """

    layers: int
    heads: int
    hidden: int
    dropout_rate: float
    train: bool
    dtype: jnp.dtype
    causal: bool
    scan: bool
    remat: bool
    flash: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        # Inside a loop the compiler cannot undo the recomputation, and Flax advises against the barriers.
        block = nn.remat(Block, prevent_cse=not self.scan) if self.remat else Block
        fields = (self.heads, self.hidden, self.dropout_rate, self.train, self.dtype, self.causal, self.flash)
        if not self.scan:
            for layer in range(self.layers):
                x = block(*fields, name=f"block{layer + 1}")(x)
            return x
        loop = nn.scan(
            lambda one, carry, _: (one(carry), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = loop(block(*fields, name="blocks"), x, None)
        return x


def layer_norm(dtype: jnp.dtype, name: str) -> nn.LayerNorm:
    """Layer normalisation (Ba et al., arXiv 1607.06450) of the last axis."""
    return nn.LayerNorm(epsilon=1e-5, dtype=dtype, name=name)
