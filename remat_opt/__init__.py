"""remat_opt: make a JAX training step fit in memory.

`optimize(train_step)` reads a whole training step, finds which tensors are worth keeping between the forward and the
backward pass, and makes XLA recompute everything else. `checkpoint(loss)` does the same for a function that others
differentiate, in place of `jax.checkpoint`; `remat_opt.linen` and `remat_opt.nnx`, which import flax when they are
first used, for Flax modules.
"""

import importlib as _importlib
from typing import Any as _Any

from remat_opt.trace import supported as _supported  # noqa: F401, it refuses a JAX that is too old

# isort: split
from remat_opt.api import frontier, largest_batch, measure, optimize
from remat_opt.callable.checkpointing import NamesPolicy, checkpoint, policy
from remat_opt.callable.frontier import Frontier, FrontierPoint
from remat_opt.callable.function import OptimizedFunction
from remat_opt.callable.largest_batch import LargestBatch
from remat_opt.callable.measure import Measurement
from remat_opt.callable.warning import RematWarning
from remat_opt.planner.batch_size import BatchPoint
from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.planner.plan import Plan, PlanError
from remat_opt.report.explain import Explanation

__all__ = [
    "BatchPoint",
    "Explanation",
    "Frontier",
    "FrontierPoint",
    "InfeasibleBudget",
    "LargestBatch",
    "Measurement",
    "NamesPolicy",
    "OptimizedFunction",
    "Plan",
    "PlanError",
    "RematWarning",
    "checkpoint",
    "frontier",
    "largest_batch",
    "measure",
    "optimize",
    "policy",
]


def __getattr__(name: str) -> _Any:
    if name in ("linen", "nnx"):
        return _importlib.import_module(f"remat_opt.{name}")
    raise AttributeError(f"module 'remat_opt' has no attribute {name!r}")
