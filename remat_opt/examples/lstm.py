"""The recurrent network of Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174, section 5.3.

Four layers of 1024 units for speech: 50 figures a frame in, one of 5,000 classes a frame out. The projection of the
frames to 1024 comes from the authors' script. The loss is summed up while time goes on, as there: the classes'
figures of all frames would take more memory than all else.
"""

from functools import partial
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

Carry = tuple[tuple[jax.Array, jax.Array], ...]


class Cell(nn.Module):
    """Hochreiter & Schmidhuber, with a forget gate: carry and input, each (batch, width), → the next carry."""

    width: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        memory, hidden = carry
        gates = nn.Dense(4 * self.width, dtype=self.dtype, name="input")(x)
        gates = gates + nn.Dense(4 * self.width, use_bias=False, dtype=self.dtype, name="hidden")(hidden)
        enter, new, forget, leave = jnp.split(gates, 4, -1)
        memory = nn.sigmoid(forget) * memory + nn.sigmoid(enter) * jnp.tanh(new)
        return memory, nn.sigmoid(leave) * jnp.tanh(memory)


class TimeStep(nn.Module):
    """All layers at one time: the carries of all layers and (frames, labels) → the next carries and the loss.

    Frames are (batch, inputs), labels (batch,); the loss is the mean over the batch.
    """

    layers: int
    width: int
    num_classes: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, carry: Carry, inputs: tuple[jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
        frames, labels = inputs
        x = nn.Dense(self.width, use_bias=False, dtype=self.dtype, name="projection")(frames)
        carries = []
        for layer in range(self.layers):
            carries.append(Cell(self.width, self.dtype, name=f"layer{layer + 1}")(carry[layer], x))
            x = carries[-1][1]
        logits = nn.Dense(self.num_classes, dtype=self.dtype, name="classifier")(x).astype(jnp.float32)
        return tuple(carries), optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LSTM(nn.Module):
    """(frames (time, batch, inputs), labels (time, batch)) → the mean loss.

    `scan` makes the time one loop, instead of a Python loop that is unrolled while tracing. `remat` wraps every time
    step in `nn.remat`.
    """

    layers: int = 4
    width: int = 1024
    num_classes: int = 5000
    dtype: jnp.dtype = jnp.float32
    remat: bool = False
    scan: bool = False
    takes_labels: ClassVar[bool] = True

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array], train: bool) -> jax.Array:
        frames, labels = inputs
        zeros = jnp.zeros((frames.shape[1], self.width), self.dtype)
        carry: Carry = ((zeros, zeros),) * self.layers
        kind = nn.remat(TimeStep, prevent_cse=not self.scan) if self.remat else TimeStep
        step = kind(self.layers, self.width, self.num_classes, self.dtype, name="step")
        if self.scan:
            loop = nn.scan(
                lambda one, carry, now: one(carry, now),
                variable_broadcast="params",
                split_rngs={"params": False},
            )
            _, losses = loop(step, carry, (frames, labels))
            return losses.mean()
        total = jnp.zeros(())
        for time in range(frames.shape[0]):
            carry, loss = step(carry, (frames[time], labels[time]))
            total = total + loss
        return total / frames.shape[0]


LSTMS = {"lstm": LSTM, "lstm_scan": partial(LSTM, scan=True)}
