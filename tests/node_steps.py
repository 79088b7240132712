"""A scanned transformer on a mesh of GPUs, as data parallel, FSDP and tensor parallel training divide it.

Nothing but jax.numpy, optax and a mesh, which may be an `AbstractMesh`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, WIDTH, HEADS, TIME, VOCABULARY = 6, 256, 8, 128, 512
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
SHAPES = {
    "qkv": (LAYERS, WIDTH, 3, HEADS, WIDTH // HEADS),
    "out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH),
    "up": (LAYERS, WIDTH, 4 * WIDTH),
    "down": (LAYERS, 4 * WIDTH, WIDTH),
    "gain": (LAYERS, 2, WIDTH),
    "embedding": (VOCABULARY, WIDTH),
}
# Of each way of training the axes of its mesh, the divided axes of the weights, and those of (batch, time, width).
FSDP = {
    "qkv": P(None, "data"),
    "out": P(None, None, None, "data"),
    "up": P(None, "data"),
    "down": P(None, None, "data"),
}
TENSOR = {
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}
WAYS: dict[str, tuple[dict[str, int], dict[str, P], P]] = {
    "data parallel": ({"data": 8}, {}, P("data")),
    "FSDP": ({"data": 8}, {**FSDP, "embedding": P(None, "data")}, P("data")),
    "tensor parallel": ({"data": 2, "model": 4}, TENSOR, P("data")),
}


def mesh_of(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def normalised(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def block(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    layer = jax.tree.map(lambda leaf: leaf.astype(x.dtype), layer)
    query, key, value = jnp.einsum("btw,wihd->ibthd", normalised(x, layer["gain"][0]), layer["qkv"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32) / (WIDTH // HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e30)).astype(x.dtype)
    x = x + jnp.einsum("bqhd,hdw->bqw", jnp.einsum("bhqk,bkhd->bqhd", weights, value), layer["out"])
    return x + jax.nn.gelu(normalised(x, layer["gain"][1]) @ layer["up"]) @ layer["down"]


def transformer(way: str | None, batch: int) -> tuple[Any, tuple[Any, jax.ShapeDtypeStruct]]:
    """A step `(state, tokens) → (state, loss)` and its abstract arguments; the state is to be donated.

    Args:
        way: one of `WAYS`; None for one device.
        batch: sequences, of all devices together.
    """
    axes, specs, rows = WAYS[way] if way else ({}, {}, P())
    mesh = mesh_of(**axes) if way else None

    def placed(x: jax.Array) -> jax.Array:
        return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, rows))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = placed(params["embedding"].astype(jnp.bfloat16)[tokens])
        layers = {name: leaf for name, leaf in params.items() if name != "embedding"}
        x, _ = lax.scan(lambda x, layer: (placed(block(layer, x)), None), x, layers)
        logits = (x @ params["embedding"].T.astype(x.dtype)).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], -1).mean()

    def step(state: Any, tokens: jax.Array) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    def like(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if mesh is None:
            return leaf
        spec = next((spec for name, spec in specs.items() if f"'{name}'" in jax.tree_util.keystr(path)), P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    state = jax.tree_util.tree_map_with_path(like, (params, jax.eval_shape(OPTIMIZER.init, params)))
    tokens = jax.ShapeDtypeStruct((batch, TIME), jnp.int32, sharding=NamedSharding(mesh, rows) if mesh else None)
    return step, (state, tokens)
