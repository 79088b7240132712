"""The sharded step of docs/how-to/sharded.md, on eight devices that the CPU stands in for.

python -m benchmarks.sharded_step
"""

import os

from benchmarks import devices_on_cpu

os.environ.update(devices_on_cpu.environment(8))
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import remat_opt

LAYERS = 4


def train_step(params, batch):
    """A step of gradient descent on a residual network of two products a layer."""

    def loss(params):
        hidden = batch
        for up, down in params:
            hidden = hidden + jax.nn.gelu(hidden @ up) @ down
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda weight, gradient: weight - 0.1 * gradient, params, gradients), value


def normal(seed, *shape):
    """Small random numbers."""
    return 0.02 * jax.random.normal(jax.random.key(seed), shape)


def train():
    """What the page shows."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    up, down = NamedSharding(mesh, P(None, "model")), NamedSharding(mesh, P("model", None))
    layers = [(normal(2 * i, 128, 512), normal(2 * i + 1, 512, 128)) for i in range(LAYERS)]
    params = [jax.device_put(layer, (up, down)) for layer in layers]
    batch = jax.device_put(normal(99, 4096, 128), NamedSharding(mesh, P("data", None)))
    step = remat_opt.optimize(train_step, donate_argnums=0)  # shardings are those of the arguments
    print(remat_opt.measure(jax.jit(train_step, donate_argnums=0), params, batch))
    for _ in range(3):
        params, loss = step(params, batch)
    print(f"\nloss {loss:.4f}, weights of layer 0: {params[0][0].sharding.spec}")


if __name__ == "__main__":
    train()
