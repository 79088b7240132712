"""Six more, in plain JAX, written without a look at the memory model."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.held_out import floats, tokens
from benchmarks.unseen.step import Unseen, cross_entropy, with_state

Params = dict[str, Any]


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution of images whose borders are padded."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=numbers)


def dense(layer: Params, x: jax.Array) -> jax.Array:
    """A dense layer."""
    return x @ layer["weight"] + layer["bias"]


def dense_shape(before: int, after: int) -> Params:
    """Parameters of `dense`."""
    return {"weight": floats(before, after), "bias": floats(after)}


def rain_cell(layer: Params, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A long short-term memory at each place that sees its neighbours; gates see the cells, too (Shi et al. 2015)."""
    hidden, cells = carry
    made = convolved(jnp.concatenate([x, hidden], -1), layer["kernel"]) + layer["bias"]
    inwards, forget, candidate, outwards = jnp.split(made, 4, -1)
    seen_in, seen_forget, seen_out = layer["peepholes"]
    forget, inwards = jax.nn.sigmoid(forget + seen_forget * cells), jax.nn.sigmoid(inwards + seen_in * cells)
    cells = forget * cells + inwards * jnp.tanh(candidate)
    return jax.nn.sigmoid(outwards + seen_out * cells) * jnp.tanh(cells), cells


def rainfall() -> Unseen:
    """Ten pictures of rain after ten that were seen: convolutions inside two loops."""
    batch, times, size, patch, features = 16, 10, 64, 4, (64, 64)
    places, seen = size // patch, patch * patch
    state = floats(batch, places, places, features[0])

    def layer_shape(inputs: int, features: int) -> Params:
        kernel, peepholes = floats(5, 5, inputs + features, 4 * features), floats(3, places, places, features)
        return {"kernel": kernel, "bias": floats(4 * features), "peepholes": peepholes}

    params = {
        "encoder": [layer_shape(seen, features[0]), layer_shape(features[0], features[1])],
        "forecaster": [layer_shape(seen, features[0]), layer_shape(features[0], features[1])],
        "last": floats(1, 1, sum(features), seen),
    }

    def patches(frames: jax.Array) -> jax.Array:
        cut = frames.reshape(batch, times, places, patch, places, patch).transpose(1, 0, 2, 4, 3, 5)
        return cut.reshape(times, batch, places, places, seen)

    def stacked(layers: list[Params], carries: list, x: jax.Array) -> list:
        after = []
        for layer, carry in zip(layers, carries, strict=True):
            after.append(rain_cell(layer, carry, x))
            x = after[-1][0]
        return after

    def loss(params: Params, before: jax.Array, coming: jax.Array) -> jax.Array:
        def read(carries: list, x: jax.Array) -> tuple[list, None]:
            return stacked(params["encoder"], carries, x), None

        def foretell(given: tuple[list, jax.Array], _: None) -> tuple[tuple[list, jax.Array], jax.Array]:
            carries = stacked(params["forecaster"], *given)
            hidden = jnp.concatenate([hidden for hidden, _ in carries], -1)
            logits = convolved(hidden, params["last"])
            return (carries, jax.nn.sigmoid(logits)), logits

        frames, nothing = patches(before), jnp.zeros(state.shape)
        carries, _ = lax.scan(read, [(nothing, nothing)] * 2, frames)
        _, logits = lax.scan(foretell, (carries, frames[-1]), None, times)
        return optax.sigmoid_binary_cross_entropy(logits, patches(coming)).sum((0, 2, 3, 4)).mean()

    frames = floats(batch, times, size, size)
    return with_state(loss, params, optax.sgd(1e-3, momentum=0.9), frames, frames)


def read_along(layer: Params, words: jax.Array, reverse: bool) -> jax.Array:
    """What a long short-term memory makes of each word and those before, or behind; time comes first."""
    features = layer["hidden"].shape[0]

    def step(carry: tuple[jax.Array, jax.Array], seen: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = carry
        inwards, forget, candidate, outwards = jnp.split(seen + hidden @ layer["hidden"], 4, -1)
        cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(inwards) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(outwards) * jnp.tanh(cell)
        return (hidden, cell), hidden

    nothing = jnp.zeros((words.shape[1], features))
    return lax.scan(step, (nothing, nothing), dense(layer["input"], words), reverse=reverse)[1]


def tagged() -> Unseen:
    """Tags of words, of which neighbours go together: a conditional random field (Lample et al. 2016)."""
    batch, length, words, embedded, features, tags = 64, 96, 20000, 128, 256, 48

    def layer_shape() -> Params:
        return {"input": dense_shape(embedded, 4 * features), "hidden": floats(features, 4 * features)}

    params = {
        "embedding": floats(words, embedded),
        "forward": layer_shape(),
        "backward": layer_shape(),
        "between": dense_shape(2 * features, features),
        "last": dense_shape(features, tags),
        "transitions": floats(tags, tags),
        "first": floats(tags),
        "end": floats(tags),
    }

    def loss(params: Params, text: jax.Array, right: jax.Array, lengths: jax.Array) -> jax.Array:
        text, right = text.T, right.T
        there = (jnp.arange(length)[:, None] < lengths).astype(jnp.float32)
        x = params["embedding"][text]
        both = [read_along(params["forward"], x, False), read_along(params["backward"], x * there[..., None], True)]
        scores = dense(params["last"], jnp.tanh(dense(params["between"], jnp.concatenate(both, -1))))

        def step(alpha: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            score, there = given
            following = jax.nn.logsumexp(alpha[:, :, None] + params["transitions"] + score[:, None], 1)
            return jnp.where(there[:, None] > 0, following, alpha), None

        alpha, _ = lax.scan(step, params["first"] + scores[0], (scores[1:], there[1:]))
        every = jax.nn.logsumexp(alpha + params["end"], -1)
        own = (jnp.take_along_axis(scores, right[..., None], -1)[..., 0] * there).sum(0)
        moves = (params["transitions"][right[:-1], right[1:]] * there[1:]).sum(0)
        last = jnp.take_along_axis(right, lengths[None] - 1, 0)[0]
        return (every - own - moves - params["first"][right[0]] - params["end"][last]).mean()

    text = tokens(batch, length)
    return with_state(loss, params, optax.sgd(0.01, momentum=0.9), text, text, tokens(batch))


def molecules() -> Unseen:
    """Energies of molecules whose atoms lie in space; turning them changes nothing (Satorras et al. 2021)."""
    count, atoms, features, kinds, depth = 96, 18, 128, 5, 4
    nodes, edges = count * atoms, count * atoms * (atoms - 1)

    layer = {
        "message": [dense_shape(2 * features + 1, features), dense_shape(features, features)],
        "gate": dense_shape(features, 1),
        "move": [dense_shape(features, features), {"weight": floats(features, 1), "bias": floats(1)}],
        "node": [dense_shape(2 * features, features), dense_shape(features, features)],
    }
    params = {
        "kinds": floats(kinds, features),
        "layers": [layer] * depth,
        "atom": [dense_shape(features, features), dense_shape(features, features)],
        "energy": [dense_shape(features, features), dense_shape(features, 1)],
    }

    def two(layers: list[Params], x: jax.Array) -> jax.Array:
        return dense(layers[1], jax.nn.silu(dense(layers[0], x)))

    def block(layer: Params, h: jax.Array, x: jax.Array, senders: jax.Array, receivers: jax.Array) -> tuple:
        apart = x[receivers] - x[senders]
        squared = jnp.sum(apart**2, -1, keepdims=True)
        message = jax.nn.silu(two(layer["message"], jnp.concatenate([h[receivers], h[senders], squared], -1)))
        message = message * jax.nn.sigmoid(dense(layer["gate"], message))
        moved = apart / (jnp.sqrt(squared + 1e-8) + 1.0) * jnp.tanh(two(layer["move"], message))
        x = x + jax.ops.segment_sum(moved, receivers, nodes) / (atoms - 1)
        heard = jax.ops.segment_sum(message, receivers, nodes)
        return h + two(layer["node"], jnp.concatenate([h, heard], -1)), x

    def loss(params: Params, graph: Params, energies: jax.Array) -> jax.Array:
        h, x = params["kinds"][graph["kinds"]], graph["places"]
        for layer in params["layers"]:
            h, x = block(layer, h, x, graph["senders"], graph["receivers"])
        whole = jax.ops.segment_sum(two(params["atom"], h), graph["molecules"], count)
        return jnp.abs(two(params["energy"], whole)[:, 0] - energies).mean()

    graph = {
        "kinds": tokens(nodes),
        "places": floats(nodes, 3),
        "molecules": tokens(nodes),
        "senders": tokens(edges),
        "receivers": tokens(edges),
    }
    return with_state(loss, params, optax.sgd(1e-3, momentum=0.9), graph, floats(count))


def layer_norm(layer: Params, x: jax.Array) -> jax.Array:
    """Rows normalised."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * layer["gain"] + layer["bias"]


def decoder(params: Params, text: jax.Array, heads: int) -> jax.Array:
    """Scores of the words that follow."""
    batch, length = text.shape
    x = params["embedding"][text] + params["positions"][:length]
    allowed = jnp.tril(jnp.ones((length, length), bool))
    for layer in params["layers"]:
        y = dense(layer["qkv"], layer_norm(layer["norm1"], x)).reshape(batch, length, 3, heads, -1)
        queries, keys, values = (y[:, :, at] for at in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
        weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(scores.dtype).min), -1)
        x = x + dense(layer["out"], jnp.einsum("bhqk,bkhd->bqhd", weights, values).reshape(batch, length, -1))
        x = x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], layer_norm(layer["norm2"], x))))
    return layer_norm(params["norm"], x) @ params["embedding"].T


def preferred() -> Unseen:
    """Of two answers the one that people like better, measured by a frozen twin (Rafailov et al. 2023)."""
    pairs, length, words, features, heads, depth, beta = 4, 257, 8000, 256, 4, 4, 0.1
    norm = {"gain": floats(features), "bias": floats(features)}
    layer = {
        "norm1": norm,
        "qkv": dense_shape(features, 3 * features),
        "out": dense_shape(features, features),
        "norm2": norm,
        "up": dense_shape(features, 4 * features),
        "down": dense_shape(4 * features, features),
    }
    params = {
        "embedding": floats(words, features),
        "positions": floats(length, features),
        "layers": [layer] * depth,
        "norm": norm,
    }

    def likelihood(params: Params, text: jax.Array, answers: jax.Array) -> jax.Array:
        probabilities = jax.nn.log_softmax(decoder(params, text[:, :-1], heads))
        chosen = jnp.take_along_axis(probabilities, text[:, 1:, None], -1)[..., 0]
        return (chosen * answers[:, 1:]).sum(-1)

    def loss(params: Params, frozen: Params, better: Params, worse: Params) -> jax.Array:
        both = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), better, worse)
        now = likelihood(params, both["text"], both["answers"])
        before = lax.stop_gradient(likelihood(frozen, both["text"], both["answers"]))
        rewards = beta * (now - before)
        return -jax.nn.log_sigmoid(rewards[:pairs] - rewards[pairs:]).mean()

    read = {"text": tokens(pairs, length), "answers": floats(pairs, length)}
    return with_state(loss, params, optax.sgd(1e-4, momentum=0.9), params, read, read)


def spline_bases(x: jax.Array, intervals: int, order: int) -> jax.Array:
    """All B-splines at each figure, by Cox and de Boor's recursion."""
    knots = (np.arange(-order, intervals + order + 1) * 2.0 / intervals - 1.0).astype(np.float32)
    x = x[..., None]
    bases = ((x >= knots[:-1]) & (x < knots[1:])).astype(x.dtype)
    for k in range(1, order + 1):
        left = (x - knots[: -(k + 1)]) / (knots[k:-1] - knots[: -(k + 1)]) * bases[..., :-1]
        right = (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k]) * bases[..., 1:]
        bases = left + right
    return bases


def splines() -> Unseen:
    """Digits, by layers that learn a function for each pair of features: splines (Liu et al. 2024)."""
    batch, widths, intervals, order = 4096, (784, 128, 64, 10), 5, 3
    params = [
        {
            "base": floats(before, after),
            "spline": floats(before, intervals + order, after),
            "scale": floats(before, after),
        }
        for before, after in pairwise(widths)
    ]

    def loss(params: list[Params], images: jax.Array, digits: jax.Array) -> jax.Array:
        x = images
        for layer in params:
            weights = layer["spline"] * layer["scale"][:, None]
            smooth = jnp.einsum("bik,iko->bo", spline_bases(x, intervals, order), weights)
            x = jax.nn.silu(x) @ layer["base"] + smooth
        decay = sum(jnp.abs(layer["spline"]).mean(1).sum() for layer in params)
        return cross_entropy(x, digits).mean() + 1e-4 * decay

    return with_state(loss, params, optax.sgd(0.05, momentum=0.9), floats(batch, widths[0]), tokens(batch))


def conv_shape(before: int, after: int, size: int = 3) -> Params:
    """Parameters of `conv_norm`."""
    return {"kernel": floats(size, size, before, after), "gain": floats(after), "bias": floats(after)}


def conv_norm(layer: Params, x: jax.Array, stride: int = 1) -> jax.Array:
    """A convolution, normalised over the batch."""
    x = convolved(x, layer["kernel"], stride)
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * layer["gain"]) + layer["bias"]


def exchange_shape(widths: tuple[int, ...]) -> list[list[Any]]:
    """Parameters of `exchanged`: what each resolution hands to each."""

    def path(source: int, target: int) -> Any:
        if source == target:
            return None
        if source > target:
            return conv_shape(widths[source], widths[target], 1)
        steps = [conv_shape(widths[source], widths[source])] * (target - source - 1)
        return [*steps, conv_shape(widths[source], widths[target])]

    return [[path(source, target) for source in range(len(widths))] for target in range(len(widths))]


def enlarged(x: jax.Array, factor: int) -> jax.Array:
    """An image of so many times the size."""
    batch, height, width, features = x.shape
    return jax.image.resize(x, (batch, factor * height, factor * width, features), "bilinear")


def exchanged(paths: list[list[Any]], branches: list[jax.Array]) -> list[jax.Array]:
    """All resolutions, to each of which all others are added."""
    after = []
    for target, row in enumerate(paths):
        total = branches[target]
        for source, path in enumerate(row):
            y = branches[source]
            if source > target:
                total = total + enlarged(conv_norm(path, y), 2 ** (source - target))
            elif source < target:
                for at, layer in enumerate(path):
                    y = conv_norm(layer, y if at == 0 else jax.nn.relu(y), 2)
                total = total + y
        after.append(jax.nn.relu(total))
    return after


def resolutions() -> Unseen:
    """Joints of people, by resolutions that stay side by side and exchange what they see (Wang et al. 2019)."""
    batch, size, widths, joints = 8, 256, (32, 64, 128), 17

    def block_shape(features: int) -> list[Params]:
        return [conv_shape(features, features), conv_shape(features, features)]

    params = {
        "stem": [conv_shape(3, 64), conv_shape(64, 64)],
        "apart": [conv_shape(64, widths[0]), conv_shape(64, widths[1]), conv_shape(widths[1], widths[2])],
        "blocks": [[block_shape(width) for width in widths[:2]], [block_shape(width) for width in widths]],
        "exchanges": [exchange_shape(widths[:2]), exchange_shape(widths)],
        "head": conv_shape(sum(widths), sum(widths), 1),
        "last": {"kernel": floats(1, 1, sum(widths), joints), "bias": floats(joints)},
    }

    def block(layers: list[Params], x: jax.Array) -> jax.Array:
        return jax.nn.relu(x + conv_norm(layers[1], jax.nn.relu(conv_norm(layers[0], x))))

    def loss(params: Params, images: jax.Array, maps: jax.Array, seen: jax.Array) -> jax.Array:
        x = images
        for layer in params["stem"]:
            x = jax.nn.relu(conv_norm(layer, x, 2))
        first, second, third = params["apart"]
        branches = [jax.nn.relu(conv_norm(first, x)), jax.nn.relu(conv_norm(second, x, 2))]
        for stage, paths in zip(params["blocks"], params["exchanges"], strict=True):
            if len(stage) > len(branches):
                branches.append(jax.nn.relu(conv_norm(third, branches[-1], 2)))
            branches = [block(layers, x) for layers, x in zip(stage, branches, strict=True)]
            branches = exchanged(paths, branches)
        x = jnp.concatenate([branches[0], *(enlarged(x, 2**at) for at, x in enumerate(branches[1:], 1))], -1)
        x = jax.nn.relu(conv_norm(params["head"], x))
        found = convolved(x, params["last"]["kernel"]) + params["last"]["bias"]
        return (jnp.square(found - maps).mean((1, 2)) * seen).mean()

    maps = floats(batch, size // 4, size // 4, joints)
    return with_state(
        loss, params, optax.sgd(0.01, momentum=0.9), floats(batch, size, size, 3), maps, floats(batch, joints)
    )
