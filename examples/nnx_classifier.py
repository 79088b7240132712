"""A convolutional classifier in Flax nnx, trained on generated images.

python examples/nnx_classifier.py
"""

import argparse

import jax
import optax
from flax import nnx

import remat_opt


class Block(nnx.Module):
    """Two convolutions with batch norm, and what came in."""

    def __init__(self, features, *, rngs):
        self.norms = nnx.List([nnx.BatchNorm(features, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List([nnx.Conv(features, features, (3, 3), rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        hidden = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            hidden = conv(nnx.relu(norm(hidden)))
        return x + hidden


class Classifier(nnx.Module):
    """A residual network for ten classes."""

    def __init__(self, features, blocks, *, rngs):
        self.stem = nnx.Conv(3, features, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(features, rngs=rngs) for _ in range(blocks)])
        self.head = nnx.Linear(features, 10, rngs=rngs)

    def __call__(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, images, labels):
    """Gradients and the update; the modules are updated in place."""

    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def main():
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    model = Classifier(options.features, options.blocks, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    step = remat_opt.optimize(train_step)
    images = jax.random.normal(jax.random.key(0), (options.batch, options.size, options.size, 3))
    labels = jax.random.randint(jax.random.key(1), (options.batch,), 0, 10)
    print(remat_opt.measure(train_step, model, optimizer, images, labels))
    for number in range(options.steps):
        print(f"step {number}: loss {step(model, optimizer, images, labels):.4f}")


if __name__ == "__main__":
    main()
