"""Vision transformers: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv 2010.11929."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.transformer import Stack, layer_norm, narrow_normal


class VisionTransformer(nn.Module):
    """Images (batch, height, width, 3), sides divisible by `patch` → logits (batch, num_classes).

    `scan` loops over the layers; `remat` wraps every block in `nn.remat`.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    dropout_rate: float = 0.1
    num_classes: int = 1000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        if x.shape[1] % self.patch or x.shape[2] % self.patch:
            raise ValueError(f"expected sides divisible by the patch of {self.patch} pixels, got {x.shape[1:3]}")
        side = (self.patch, self.patch)
        x = nn.Conv(self.width, side, side, padding="VALID", dtype=self.dtype, name="patches")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width)).astype(self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(first, (x.shape[0], 1, self.width)), x], 1)
        x = x + self.param("positions", narrow_normal, (1, *x.shape[1:])).astype(self.dtype)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        sizes = (self.layers, self.heads, 4 * self.width, self.dropout_rate, train, self.dtype)
        x = Stack(*sizes, causal=False, scan=self.scan, remat=self.remat, name="stack")(x)
        x = layer_norm(self.dtype, "final_norm")(x[:, 0])
        return nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x)


VITS = {"vit_b16": VisionTransformer, "vit_b16_scan": partial(VisionTransformer, scan=True)}
