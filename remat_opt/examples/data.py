"""Generated batches that the networks can learn from: one function for each kind of task.

Each makes (inputs, labels) from a key and static sizes, so that `jax.eval_shape` gives the shapes without the numbers.
"""

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.jit, static_argnums=(1, 2, 3))
def pattern_images(
    key: jax.Array, shape: tuple[int, int, int, int], dtype: jnp.dtype, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """Images (batch, height, width, channels) and labels (batch,): a fixed coarse pattern for each class, and noise."""
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, shape[:1], 0, num_classes)
    patterns = jax.random.normal(jax.random.key(0), (num_classes, 4, 4, shape[-1]))
    images = jax.image.resize(patterns[labels], shape, "linear") + 0.5 * jax.random.normal(noise_key, shape)
    return images.astype(dtype), labels


@partial(jax.jit, static_argnums=(1, 2, 3))
def blob_images(
    key: jax.Array, shape: tuple[int, int, int, int], dtype: jnp.dtype, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """Images (batch, height, width, channels) and a label of each pixel (batch, height, width).

    Smooth random hills, seen through noise; the label says how high.
    """
    hill_key, noise_key = jax.random.split(key)
    coarse = jax.random.uniform(hill_key, (shape[0], 6, 6, 1))
    hills = jax.image.resize(coarse, (*shape[:3], 1), "linear")
    labels = jnp.minimum((hills[..., 0] * num_classes).astype(jnp.int32), num_classes - 1)
    return (hills + 0.1 * jax.random.normal(noise_key, shape)).astype(dtype), labels


@partial(jax.jit, static_argnums=(1, 2))
def counting_text(key: jax.Array, shape: tuple[int, int], num_classes: int) -> tuple[jax.Array, jax.Array]:
    """Tokens (batch, time) and the next one of each (batch, time): counting on, from random starts by random steps."""
    start_key, step_key = jax.random.split(key)
    start = jax.random.randint(start_key, (shape[0], 1), 0, num_classes)
    step = jax.random.randint(step_key, (shape[0], 1), 1, 4)
    tokens = (start + step * jnp.arange(shape[1] + 1)) % num_classes
    return tokens[:, :-1], tokens[:, 1:]


@partial(jax.jit, static_argnums=(1, 2))
def mirrored_text(
    key: jax.Array, shape: tuple[int, int], num_classes: int
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """((source, target shifted by one), target), each (batch, time): the target is the source from its end.

    Token 0 begins each target.
    """
    source = jax.random.randint(key, shape, 1, num_classes)
    target = source[:, ::-1]
    return (source, jnp.pad(target[:, :-1], ((0, 0), (1, 0)))), target


@partial(jax.jit, static_argnums=(1, 2, 3))
def spoken_frames(
    key: jax.Array, shape: tuple[int, int, int], dtype: jnp.dtype, num_classes: int
) -> tuple[jax.Array, jax.Array]:
    """Frames (time, batch, figures) and labels (time, batch): fixed figures for each class, and noise."""
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, shape[:2], 0, num_classes)
    figures = jax.random.normal(jax.random.key(0), (num_classes, shape[-1]))
    return (figures[labels] + 0.5 * jax.random.normal(noise_key, shape)).astype(dtype), labels
