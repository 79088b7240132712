"""Language models: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from remat_opt.examples.transformer import Stack, layer_norm, narrow_normal


class GPT(nn.Module):
    """Tokens (batch, time) → logits of the next one (batch, time, num_classes); time is at most `context`.

    The embedding is also the last layer. `num_classes` is the size of the vocabulary. `scan` loops over the layers;
    `remat` wraps every block in `nn.remat`; `flash` is as of `transformer.Attention`.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    dropout_rate: float = 0.1
    num_classes: int = 50257
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan: bool = False
    flash: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        time = tokens.shape[1]
        if time > self.context:
            raise ValueError(f"expected at most {self.context} tokens (field `context`), got {time}")
        embedding = nn.Embed(
            self.num_classes, self.width, dtype=self.dtype, embedding_init=narrow_normal, name="embedding"
        )
        positions = self.param("positions", narrow_normal, (self.context, self.width))
        x = embedding(tokens) + positions[:time].astype(self.dtype)
        x = nn.Dropout(self.dropout_rate, deterministic=not train)(x)
        sizes = (self.layers, self.heads, 4 * self.width, self.dropout_rate, train, self.dtype)
        x = Stack(*sizes, causal=True, scan=self.scan, remat=self.remat, flash=self.flash, name="stack")(x)
        return embedding.attend(layer_norm(self.dtype, "final_norm")(x))


GPTS = {
    "gpt2": GPT,
    "gpt2_scan": partial(GPT, scan=True),
    # The smaller one on which other tools were measured: no dropout.
    "gpt": partial(GPT, 12, 512, 8, 512, 0.0),
    "gpt_scan": partial(GPT, 12, 512, 8, 512, 0.0, scan=True),
    # As large as one device holds with its gradients and moments.
    "gpt_1b_scan": partial(GPT, 24, 2048, 16, 2048, 0.0, scan=True, flash=True),
}
