"""A language model in Flax nnx: layers in a scan, weights and batch divided over all devices (FSDP).

python examples/nnx_gpt_fsdp.py

Without accelerators: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/nnx_gpt_fsdp.py
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import remat_opt

VOCABULARY = 256


class Layer(nnx.Module):
    """Attention and a feed-forward network, each with its norm."""

    def __init__(self, width, heads, *, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)
        self.heads = heads

    def __call__(self, x):
        x = jax.lax.with_sharding_constraint(x, PartitionSpec("data"))
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).reshape(batch, length, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    """Logits of the next token; the layers' weights are stacked."""

    def __init__(self, layers, width, length, heads=4, *, rngs):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        make = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Layer(width, heads, rngs=rngs)))
        self.layers = make(rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.tokens.attend(self.norm(run(x, self.layers)))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, tokens):
    """Gradients and the update; the modules are updated in place."""

    def loss_of(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def divide(module, mesh):
    """Divide a module's arrays of two axes or more over all devices, along the last one."""

    def place(array):
        axes = (*[None] * (array.ndim - 1), "data") if array.ndim > 1 else ()
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    nnx.update(module, jax.tree.map(place, nnx.state(module)))


def main():
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="a multiple of the number of devices")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    jax.set_mesh(mesh)
    model = GPT(options.layers, options.width, options.length, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    divide(model, mesh)
    divide(optimizer, mesh)
    tokens = jnp.arange(options.batch * (options.length + 1)).reshape(options.batch, -1) % VOCABULARY
    tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data")))
    step = remat_opt.optimize(train_step)
    print(step.explain(model, optimizer, tokens))
    for number in range(options.steps):
        print(f"step {number}: loss {step(model, optimizer, tokens):.4f}")
    print(f"weights of a product: {model.layers.up.kernel.sharding.spec} over {mesh.size} devices")


if __name__ == "__main__":
    main()
