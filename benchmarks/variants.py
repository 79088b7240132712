"""One training step in the ways that can be compared: plain, by hand, by other methods, and ours.

A variant is named as on the command line: `plain`; `nn.remat`, by hand round every block; `chen`, √n segments; a stock
policy of `jax.checkpoint` round the whole network; `ours`, the least memory that costs at most one more forward pass;
`ours@0.5`, ours with half of the plain step's temporary memory; `ours@nn.remat`, ours in the physical peak of another
variant; `ours-by-flops@nn.remat`, the same with the fewest FLOPs instead of the least estimated time; `split@8`,
the least memory with the batch in eight chunks, `split@8@0.9` the least time so within a budget; `offload@0.3`, with
values on the host; `tuned@0.5`, the fastest of the plans that were timed on the attached device.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import remat_opt
from benchmarks.tables import (
    BY_FLOPS,
    OFFLOAD,
    OFFLOAD_DOTS,
    OURS,
    POLICIES,
    SPLIT,
    TUNED,
    VARIANTS,
    Row,
    is_planned,
)
from remat_opt.examples import TrainingExample, make_example
from remat_opt.planner.plan import Plan
from remat_opt.targets import CompilationOutOfMemory, Figures, measure_flat, resolve_target
from remat_opt.targets.options import compiler_options_for
from remat_opt.trace import compat
from remat_opt.version import __version__
from tests.flop_walk import flops_of


class _Checkpointed(nn.Module):
    """A network under one `jax.checkpoint` with a policy."""

    network: nn.Module
    policy: Callable[..., Any] | None

    @property
    def takes_labels(self) -> bool:
        return getattr(self.network, "takes_labels", False)

    @property
    def dropout_rate(self) -> float:
        return getattr(self.network, "dropout_rate", 0.0)

    def __call__(self, inputs: Any, train: bool) -> Any:
        return nn.remat(lambda network, inputs: network(inputs, train), policy=self.policy)(self.network, inputs)


@dataclasses.dataclass(frozen=True)
class Written:
    """A variant's step, ready to be compiled.

    Attributes:
        step: called like `jax.jit(train_step)`.
        example: what it is a step of.
        plan: ours; None for the variants that are not planned by us.
        plan_seconds: tracing, reading and searching, without what was compiled on the way.
    """

    step: Any
    example: TrainingExample
    plan: Plan | None = None
    plan_seconds: float | None = None


def example_of(row: Row, variant: str = "plain") -> TrainingExample:
    """The training step of a row, with the checkpoints that a variant puts into the network."""

    def checkpointed(kind: type[nn.Module]) -> Callable[..., nn.Module]:
        return lambda **fields: _Checkpointed(kind(**fields), policy)

    if variant == OFFLOAD_DOTS:
        policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    else:
        policy = getattr(jax.checkpoint_policies, variant, None)

    wrap, remat = checkpointed if variant in (*POLICIES, OFFLOAD_DOTS) else None, variant == "nn.remat"
    given = {"batch": row.batch, "size": row.size, "small": row.small, "dtype": jnp.dtype(row.dtype)}
    return make_example(row.network, **given, remat=remat, wrap=wrap)


def write(
    row: Row, variant: str, target: str, known: Mapping[str, Mapping[str, Any]], *, verify: bool = True
) -> Written:
    """The step of a variant, planned where it is ours.

    Args:
        row: the network.
        variant: see the module.
        target: to plan for.
        known: results of the row's other variants, which a budget may speak of.
        verify: see `optimize`.

    Raises:
        ValueError: there is no such variant, or its budget is that of a variant that has no result yet.
    """
    example = example_of(row, variant)
    if variant in ("plain", "nn.remat", *POLICIES):
        return Written(jax.jit(example.train_step, donate_argnums=example.donate_argnums), example)
    name, _, budget = variant.partition("@")
    chunks, _, budget = budget.partition("@") if name == SPLIT else ("", "", budget)
    if not is_planned(variant):
        raise ValueError(
            f"unknown variant {variant!r}; known are {', '.join(VARIANTS)}; after "
            f"{'@, '.join((*OURS, OFFLOAD, TUNED))}@ may stand any fraction or other variant, after {SPLIT}@ a number "
            "of chunks"
        )
    step = remat_opt.optimize(
        example.train_step,
        target=dataclasses.replace(resolve_target(target), counts_flops=True) if name == BY_FLOPS else target,
        budget=_budget_of(budget, known),
        solver="chen" if name == "chen" else "auto",
        donate_argnums=example.donate_argnums,
        verify=verify or name == TUNED,  # what is timed is compiled
        split=bool(chunks) and int(chunks),
        offload=name == OFFLOAD,
        tune=name == TUNED,
    )
    args = (example.init(), *example.batch()) if name == TUNED else example.abstract_args
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", remat_opt.RematWarning)  # what they say is in the plan's note
        plan = step.plan(*args)
        seconds = step.explain(*args).seconds
    return Written(step, example, plan, sum(spent for stage, spent in seconds.items() if stage != "compile"))


def _budget_of(text: str, known: Mapping[str, Mapping[str, Any]]) -> int | float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    if "physical_peak_bytes" not in known.get(text, {}):
        raise ValueError(f"expected a fraction, or a variant that was measured before, got {text!r}; measure it first")
    return known[text]["physical_peak_bytes"]


def predict_variant(
    row: Row, variant: str, target: str, known: Mapping[str, Mapping[str, Any]], plain_flops: float
) -> dict[str, Any] | None:
    """What is known of a variant, with the predictions of today, if its plan is the one that was measured.

    Args:
        row: the network.
        variant: ours, see the module; in `known`.
        target: name of the target.
        known: results of the row's variants.
        plain_flops: of the plain step, by `count_flops`.

    Returns:
        The result; None where the FLOPs are others to the last digit that is kept, or the predicted peak is another by
        more than a hundredth, as also where the compiler's word had changed the plan: then it is to be measured again.
    """
    kept = known[variant]
    try:
        written = write(row, variant, target, known, verify=False)
    except remat_opt.InfeasibleBudget:
        return dict(kept) if "infeasible" in kept else None
    planned = _planned(written, plain_flops)
    if planned["extra_flops"] != kept.get("extra_flops"):
        return None
    if not math.isclose(planned["predicted_peak_bytes"], kept["predicted_peak_bytes"], rel_tol=0.01):
        return None
    return {**kept, **{name: planned[name] for name in planned if name.startswith("predicted_")}}


def measure_variant(
    row: Row, variant: str, target: str, known: Mapping[str, Mapping[str, Any]], plain_flops: float
) -> dict[str, Any]:
    """Plan and compile one variant of a row, in this process. Nothing runs and nothing is allocated.

    Args:
        row: the network.
        variant: see the module.
        target: name of the target.
        known: results of the row's other variants, which a budget may speak of.
        plain_flops: of the plain step, by `count_flops`.

    Returns:
        What is kept in the results: bytes, seconds, and extra FLOPs as a part of the plain step's.
    """
    versions = {"jax_version": jax.__version__, "remat_opt_version": __version__}
    try:
        written = write(row, variant, target, known)
    except remat_opt.InfeasibleBudget as refusal:
        return {"infeasible": str(refusal).partition(". ")[0], **versions}
    result = _planned(written, plain_flops)
    started = time.perf_counter()
    try:
        figures = (written.plan and written.plan.measured) or compile_step(
            written.step, written.example, target, is_plain=variant == "plain"
        )
    except CompilationOutOfMemory as refusal:
        spent = round(time.perf_counter() - started, 2)
        return {**result, "needed_bytes": refusal.needed_bytes, "compile_seconds": spent, **versions}
    return {
        **result,
        "temp_bytes": figures.temp_bytes,
        "physical_peak_bytes": figures.physical_peak_bytes,
        "compile_seconds": round(figures.compile_seconds, 2),
        "autotuned": figures.autotuned,
        **versions,
    }


def _planned(written: Written, plain_flops: float) -> dict[str, Any]:
    """What is kept of a step before it is compiled."""
    result: dict[str, Any] = {"extra_flops": round(count_flops(written) / plain_flops - 1, 5) + 0.0}  # no −0.0
    if written.plan is None:
        return result
    predicted = written.plan.predicted
    return {
        **result,
        "predicted_peak_bytes": predicted.peak_bytes,
        "predicted_extra_flops": round(predicted.extra_flops / predicted.flops, 5),
        "predicted_extra_time": round(predicted.extra_seconds / predicted.seconds, 5),
        "plan_seconds": round(written.plan_seconds or 0.0, 2),
        "note": written.plan.note,
    }


def count_flops(written: Written) -> float:
    """FLOPs of a step as its jaxpr says, counted apart from the package."""
    traced = written.step.trace(*written.example.abstract_args)
    return flops_of(compat.without_dead_code(traced.jaxpr))


def compile_step(step: Any, example: TrainingExample, target: str, *, is_plain: bool) -> Figures:
    """Compile the step of a variant for a target and read the compiler's figures.

    Args:
        step: called like `jax.jit(train_step)`.
        example: what it is a step of.
        target: one of `TARGETS`.
        is_plain: whether it has no checkpoints. On the CPU the barriers of all others are kept: without them
            `jax.checkpoint` saves nothing there.
    """
    traced = step.trace(*example.abstract_args)
    return measure_flat(
        compat.function_of_jaxpr(traced),
        [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jax.tree.leaves(example.abstract_args)],
        donated=[index for index, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated],
        target=target,
        compiler_options=None if is_plain else compiler_options_for(resolve_target(target).platform),
    )
