"""`remat_opt.linen.remat` in place of `flax.linen.remat`."""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from checks import assert_close, checkpoints_in

import remat_opt
import remat_opt.linen


class Block(nn.Module):
    """Parameters, batch statistics, two random streams, an intermediate that is sown, and a static argument."""

    width: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))
        y = nn.Dropout(0.2, deterministic=not train)(nn.relu(y))
        if train:
            y = y + 0.1 * jax.random.normal(self.make_rng("noise"), y.shape)
        self.sow("intermediates", "mean", y.mean())
        return x + nn.Dense(self.width, name="out")(y)


class Network(nn.Module):
    """A stack of blocks and one logit."""

    block: Any = Block
    depth: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for index in range(self.depth):
            x = self.block(name=f"block{index}")(x, train)
        return nn.Dense(1)(x).mean()


MUTABLE = ["batch_stats", "intermediates"]


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (16, 8))


def step_of(model: nn.Module) -> Any:
    def step(variables, x):
        def loss(params):
            rngs = {"dropout": jax.random.key(2), "noise": jax.random.key(3)}
            return model.apply({**variables, "params": params}, x, True, rngs=rngs, mutable=MUTABLE)

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    return jax.jit(step)


def init(model: nn.Module, x: jax.Array) -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(2), "noise": jax.random.key(3)}
    return jax.jit(lambda x: model.init(keys, x, False))(x)


REMATS = {
    "whole": lambda: remat_opt.linen.remat(Network, static_argnums=2)(),
    "blocks": lambda: Network(block=remat_opt.linen.remat(Block, static_argnums=(2,))),
    "static by name": lambda: remat_opt.linen.remat(Network, static_argnames="train")(),
    "both": lambda: remat_opt.linen.remat(Network, static_argnums=2)(remat_opt.linen.remat(Block, static_argnums=2)),
    "a budget": lambda: remat_opt.linen.remat(Network, static_argnums=2, budget=0.4)(),
}


@pytest.mark.short
@pytest.mark.parametrize("how", ["whole", "blocks", "both", "a budget"])
def test_values_gradients_and_state_are_the_same(how: str, x: jax.Array) -> None:
    model, plain = REMATS[how](), Network()
    variables = init(plain, x)
    assert_close(init(model, x), variables, 0, 0)
    assert_close(step_of(model)(variables, x), step_of(plain)(variables, x))
    assert checkpoints_in(step_of(model), variables, x) >= 2


def test_static_arguments_by_name(x: jax.Array) -> None:
    model = REMATS["static by name"]()
    variables = init(Network(), x)
    rngs = {"dropout": jax.random.key(2), "noise": jax.random.key(3)}
    ours = model.apply(variables, x, train=True, rngs=rngs, mutable=MUTABLE)
    assert_close(ours, Network().apply(variables, x, train=True, rngs=rngs, mutable=MUTABLE))


def test_the_parameter_tree_is_that_of_flax(x: jax.Array) -> None:
    class Outer(nn.Module):
        remat: Any

        @nn.compact
        def __call__(self, x):
            return self.remat(Block, static_argnums=2)()(x, False)

    trees = [jax.tree.structure(Outer(remat).init(jax.random.key(0), x)) for remat in (nn.remat, remat_opt.linen.remat)]
    assert trees[0] == trees[1]


def test_other_methods_and_their_options(x: jax.Array) -> None:
    class Autoencoder(nn.Module):
        def setup(self):
            self.down, self.up = nn.Dense(4), nn.Dense(8)

        def encode(self, x, scale):
            return jnp.tanh(self.down(x)) * scale

        def decode(self, z):
            return jnp.tanh(self.up(z))

        def __call__(self, x):
            return self.decode(self.encode(x, 2.0))

    some = remat_opt.linen.remat(Autoencoder, methods=["encode", "decode"])()
    each = remat_opt.linen.remat(Autoencoder, methods={"encode": {"static_argnums": 2}})()
    variables = Autoencoder().init(jax.random.key(0), x)
    for model in (some, each):
        ours = jax.grad(lambda v, model=model: model.apply(v, x).sum())(variables)
        assert_close(ours, jax.grad(lambda v: Autoencoder().apply(v, x).sum())(variables))
        assert_close(
            model.apply(variables, x, 2.0, method="encode"), Autoencoder().apply(variables, x, 2.0, method="encode")
        )


def test_as_a_decorator_of_a_method(x: jax.Array) -> None:
    def layers(self: nn.Module, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = nn.relu(nn.Dense(8)(x))
        return x.mean()

    class Plain(nn.Module):
        __call__ = nn.compact(layers)

    class Decorated(nn.Module):
        __call__ = remat_opt.linen.remat(nn.compact(layers))

    variables = Plain().init(jax.random.key(0), x)
    ours, plain = (jax.jit(jax.grad(lambda v, m=m: m.apply(v, x)))(variables) for m in (Decorated(), Plain()))
    assert_close(ours, plain)


class Layer(nn.Module):
    """A scanned layer: carry → (carry, None)."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = nn.Dropout(0.2, deterministic=False)(nn.tanh(nn.Dense(16)(x)))
        return x + nn.Dense(8)(y), None


def scanned(layer: Any) -> Any:
    return nn.scan(
        layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3, metadata_params={}
    )


class OfScan(nn.Module):
    """A scan over layers, as a loss."""

    layer: Any = Layer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return scanned(self.layer)(name="layers")(x, None)[0].mean()


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_scan_inside_and_outside(where: str, x: jax.Array) -> None:
    plain = OfScan()
    model = OfScan(remat_opt.linen.remat(Layer)) if where == "inside" else remat_opt.linen.remat(OfScan)()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = plain.init(keys, x)
    assert_close(model.init(keys, x), variables)
    ours, theirs = (
        jax.jit(jax.grad(lambda v, m=m: m.apply(v, x, rngs={"dropout": jax.random.key(5)})))(variables)
        for m in (model, plain)
    )
    assert_close(ours, theirs)


def test_initialising_plans_nothing(x: jax.Array) -> None:
    model = REMATS["whole"]()
    assert checkpoints_in(lambda x: init(model, x), x) == 0


def test_a_policy_is_obeyed_as_by_nn_remat(x: jax.Array) -> None:
    policy = jax.checkpoint_policies.dots_saveable
    options: dict[str, Any] = {"policy": policy, "prevent_cse": False}
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = Layer().init(keys, x, None)

    def gradient(model):
        return jax.grad(lambda v: model.apply(v, x, None, rngs=keys)[0].sum())

    ours, theirs = (gradient(remat(Layer, **options)()) for remat in (remat_opt.linen.remat, nn.remat))
    found = [text_of(jax.make_jaxpr(f)(variables)) for f in (ours, theirs)]
    assert found[0] == found[1]
    assert "prevent_cse=False" in found[0]
    assert "policy=None" not in found[0]
    assert_close(ours(variables), gradient(Layer())(variables))


def text_of(jaxpr: Any) -> str:
    return re.sub("0x[0-9a-f]+", "", str(jaxpr))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="a policy or budget"):
        remat_opt.linen.remat(Block, policy=jax.checkpoint_policies.dots_saveable, budget=0.5)
    with pytest.raises(NotImplementedError, match="static_argnums"):
        remat_opt.linen.remat(Block, concrete=True)
    with pytest.raises(ValueError, match="solver"):
        remat_opt.linen.remat(Block, solver="nope")
