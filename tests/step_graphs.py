"""The graphs of real steps: those of `training_steps.STEPS`, and of networks of the examples."""

import functools
from typing import Any

import jax
from training_steps import STEPS

from remat_opt.examples import image_classifier
from remat_opt.graph.build import build
from remat_opt.graph.cost import Rates
from remat_opt.graph.graph import Graph
from remat_opt.program.inline import inline
from remat_opt.targets import resolve_target

NETWORKS = {"resnet50": (64, 224), "densenet121": (32, 224), "vgg16": (64, 224), "alexnet": (1024, 224)}
PLAIN_STEPS = [name for name, case in STEPS.items() if not name.startswith(("nnx", "equinox"))]


@functools.cache
def graph_of(name: str, target: str = "h200") -> Graph:
    """The graph of a step of `STEPS` or of a network of the examples, its state donated, with a target's costs."""
    if name in NETWORKS:
        batch, size = NETWORKS[name]
        example = image_classifier(name, batch=batch, size=size)
        traced = jax.jit(example.train_step, donate_argnums=0).trace(*example.abstract_args)
    else:
        case = STEPS[name]()
        jitted: Any = case.step if hasattr(case.step, "trace") else jax.jit(case.step)
        traced = jitted.trace(*case.make_args(), **case.make_kwargs())
    donated = tuple(leaf.donated for leaf in jax.tree.leaves(traced.args_info))
    device = resolve_target(target)
    return build(inline(traced.jaxpr), Rates(device.bandwidth, device.flops), donated).graph
