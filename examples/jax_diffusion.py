"""A diffusion model of vectors in plain JAX: learn to tell the noise that was added.

python examples/jax_diffusion.py
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import remat_opt

OPTIMIZER = optax.adam(1e-3)


def new_params(key, layers, width):
    """Weights of a residual network that gets the noise's level, too."""

    def dense(key, rows, columns):
        return jax.random.normal(key, (rows, columns)) / rows**0.5

    keys = iter(jax.random.split(key, 2 * layers + 1))
    blocks = [
        {"up": dense(next(keys), width, 4 * width), "down": 0.1 * dense(next(keys), 4 * width, width)}
        for _ in range(layers)
    ]
    return {"level": dense(next(keys), 16, width), "blocks": blocks}


def denoise(params, noisy, level):
    """The noise in each row."""
    waves = jnp.sin(level[:, None] * 2.0 ** jnp.arange(16))
    hidden = noisy + waves @ params["level"]
    for block in params["blocks"]:
        hidden = hidden + jax.nn.silu(hidden @ block["up"]) @ block["down"]
    return hidden


def train_step(params, moments, key, data):
    """Draw levels and noise, take the gradients, update."""
    level_key, noise_key = jax.random.split(key)
    level = jax.random.uniform(level_key, (len(data),))
    noise = jax.random.normal(noise_key, data.shape)
    noisy = jnp.sqrt(1 - level)[:, None] * data + jnp.sqrt(level)[:, None] * noise

    def loss_of(params):
        return jnp.mean((denoise(params, noisy, level) - noise) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments, loss


def main():
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    params = new_params(jax.random.key(0), options.layers, options.width)
    moments = OPTIMIZER.init(params)
    data = jax.random.normal(jax.random.key(1), (options.batch, 1)) * jnp.ones((1, options.width))
    step = remat_opt.optimize(train_step, donate_argnums=(0, 1))
    print(remat_opt.measure(jax.jit(train_step, donate_argnums=(0, 1)), params, moments, jax.random.key(2), data))
    for number in range(options.steps):
        params, moments, loss = step(params, moments, jax.random.key(number), data)
        print(f"step {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
