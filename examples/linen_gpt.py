"""A small GPT in Flax linen with `TrainState`, trained on generated tokens.

python examples/linen_gpt.py
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import remat_opt

VOCABULARY = 256


class Layer(nn.Module):
    """Attention and a feed-forward network, each with its norm."""

    heads: int

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        width = x.shape[-1]
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    """Logits of the next token."""

    layers: int
    width: int
    heads: int = 4

    @nn.compact
    def __call__(self, tokens):
        positions = self.param("positions", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
        x = nn.Embed(VOCABULARY, self.width)(tokens) + positions
        for _ in range(self.layers):
            x = Layer(self.heads)(x)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def train_step(state, tokens):
    """Gradients and the update."""

    def loss_of(params):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    tokens = jnp.arange(options.batch * (options.length + 1)).reshape(options.batch, -1) % VOCABULARY
    model = GPT(options.layers, options.width)
    params = model.init(jax.random.key(0), tokens[:, :-1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
    step = remat_opt.optimize(train_step, donate_argnums=0)
    print(remat_opt.measure(jax.jit(train_step, donate_argnums=0), state, tokens))
    for number in range(options.steps):
        state, loss = step(state, tokens)
        print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
