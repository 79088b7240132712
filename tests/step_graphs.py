"""The graphs of real steps: those of `training_steps.STEPS`, and of networks of the examples."""

import functools
from typing import Any

import jax
from training_steps import STEPS, smaller_case

from remat_opt.examples import EXAMPLES, make_example
from remat_opt.graph.build import build
from remat_opt.graph.graph import Graph
from remat_opt.planner.prepared import rates_of
from remat_opt.targets import resolve_target
from remat_opt.trace.inline import inline

NETWORKS = ("resnet50", "vgg16", "alexnet")
# The small twins of the examples; those of the same file that are no different, and of `NETWORKS`, left out.
_ALIKE = ("vgg1", "resnet3", "resnet101", "resnet152", "resnet200", "densenet16", "densenet2", "wide_resnet", "unet")
_ALIKE += ("gpt", "dynamicconv", "transformer_big", "randwire_regular", "amoebanet", "nasnet", *NETWORKS)
TWINS = tuple(name for name in EXAMPLES if not name.startswith(_ALIKE) and not name.endswith("_scan"))
# What inlining merges of a checkpoint leaves the graph of the step without it, "dropout" is the transformer with masks,
# and the last two are chains as "mlp" is.
_NO_OTHER_GRAPH = ("nnx", "equinox", "checkpoint", "transformer", "keyword_and_static", "has_aux")
PLAIN_STEPS = [name for name in STEPS if not name.startswith(_NO_OTHER_GRAPH)]


@functools.cache
def graph_of(name: str, target: str = "h200", *, small: bool = False) -> Graph:
    """The graph of a step, its state donated, with a target's costs.

    Args:
        name: of `training_steps.SMALLER`, or of an example.
        target: whose costs.
        small: whether it is the example's small twin.
    """
    if name in EXAMPLES:
        example = make_example(name, small=small)
        traced = jax.jit(example.train_step, donate_argnums=0).trace(*example.abstract_args)
    else:
        case = smaller_case(name)
        jitted: Any = case.step if hasattr(case.step, "trace") else jax.jit(case.step)
        traced = jitted.trace(*case.make_args(), **case.make_kwargs())
    donated = tuple(leaf.donated for leaf in jax.tree.leaves(traced.args_info))
    return build(inline(traced.jaxpr), rates_of(resolve_target(target)), donated).graph
