"""`python -m remat_opt demo`: one real training step, plain and optimised side by side, really trained.

Three variants of the same step, all jitted with the training state donated: as users have it, by `optimize`, and with
every block wrapped in `nn.remat` by hand. On the CPU the last one is compiled with its barriers kept; without that
option it saves nothing there (JAX issue 19822).

Each is compiled a second time without donation, for its figure only: results then have memory of their own, which does
not count as temporary, and the plain step's temporary memory is less than what it is with the updates in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from remat_opt.api import largest_batch, optimize
from remat_opt.callable.function import OptimizedFunction
from remat_opt.callable.largest_batch import LargestBatch
from remat_opt.callable.warning import RematWarning
from remat_opt.planner.budget import InfeasibleBudget
from remat_opt.report.explain import Explanation
from remat_opt.targets import Figures, read_figures, resolve_target
from remat_opt.targets.options import BARRIERS_KEPT
from remat_opt.trace.flops import FlopCount, count_flops
from remat_opt.version import __version__

SCHEMA = 1
PLAIN, OPTIMISED, BY_HAND = "plain", "remat_opt", "nn.remat"
LEARNING_RATE = 0.01  # the papers' is for batches of 256 and makes the loss of a small one rise

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: str = "resnet50"
    batch: int = 8
    size: int = 128
    steps: int = 3
    runs: int = 5
    budget: int | float | str | None = None
    largest_batch: int | None = None


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a training state differs from the plain step's.

    Attributes:
        arrays: how many arrays the state has.
        differing: how many of them are not the same bit for bit.
        largest: the largest difference of any element; 0.0 where all are bit-identical.
        largest_parameter: the same of the parameters alone, without momenta and batch statistics.
    """

    arrays: int
    differing: int
    largest: float
    largest_parameter: float


@dataclasses.dataclass
class Variant:
    """One way of making the step, with what was measured of it.

    Attributes:
        name: heads its column.
        make: jits it; takes the positions of the arguments to donate.
        step: it, jitted with the training state donated.
        figures: the compiler's, of `step`.
        flops: of `step`, loops times their length.
        figures_undonated: the compiler's, with nothing donated.
        compile_seconds: wall time of tracing, planning and compiling `step`.
        losses: one for each training step.
        difference: of the trained state to the plain step's.
        step_seconds: wall time of each timed step.
    """

    name: str
    make: Callable[[tuple[int, ...]], Any]
    step: Any = None
    figures: Figures | None = None
    flops: FlopCount | None = None
    figures_undonated: Figures | None = None
    compile_seconds: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    difference: Difference | None = None
    step_seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_seconds(self) -> float:
        """Median wall time of a timed step; 0 where none was timed."""
        return statistics.median(self.step_seconds) if self.step_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All that the demo found."""

    options: Options
    parameters: int
    variants: dict[str, Variant]
    explanation: Explanation
    largest_batch: LargestBatch | None
    seconds: float


def run(options: Options, say: Say = lambda message: None) -> Outcome:
    """Compile, train, compare and time the three variants.

    Args:
        options: what to run.
        say: told what is going on, before each part that takes a while.
    """
    from remat_opt.examples import image_classifier  # needs flax and optax

    started = time.perf_counter()
    network: dict[str, Any] = {"batch": options.batch, "size": options.size, "learning_rate": LEARNING_RATE}
    example = image_classifier(options.model, **network)
    largest = None
    if options.largest_batch is not None:
        say(f"the largest batch of {options.model}")
        largest = largest_batch(
            example.train_step,
            lambda batch: image_classifier(options.model, **{**network, "batch": batch}).abstract_args,
            budget=options.largest_batch,
            multiple_of=options.batch,
            donate_argnums=example.donate_argnums,
        )
    variants = _variants(example.train_step, image_classifier(options.model, **network, remat=True).train_step, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # what it says is the plan's note, which is shown
        for variant in variants:
            say(f"compiling {options.model}, {variant.name}")
            _compile(variant, example)
        _train(variants, example, options.steps, say)
        _time(variants, example, options.runs, say)
        optimised: OptimizedFunction = variants[1].step
        explanation = optimised.explain(example.init(), *example.batch())
    parameters = sum(leaf.size for leaf in jax.tree.leaves(example.abstract_args[0].params))
    seconds = time.perf_counter() - started
    return Outcome(options, parameters, {v.name: v for v in variants}, explanation, largest, seconds)


def _variants(train_step: Callable, by_hand: Callable, options: Options) -> list[Variant]:
    kept = BARRIERS_KEPT if jax.default_backend() == "cpu" else None

    def optimised(donated: tuple[int, ...]) -> OptimizedFunction:
        return optimize(train_step, budget=options.budget, donate_argnums=donated)

    return [
        Variant(PLAIN, lambda donated: jax.jit(train_step, donate_argnums=donated)),
        Variant(OPTIMISED, optimised),
        Variant(BY_HAND, lambda donated: jax.jit(by_hand, donate_argnums=donated, compiler_options=kept)),
    ]


def _compile(variant: Variant, example: Any) -> None:
    variant.step = variant.make(example.donate_argnums)
    # The calls that train use the same executable.
    arguments = (example.init(), *example.batch())
    variant.figures, variant.compile_seconds = _figures(variant.step, arguments)
    variant.flops = count_flops(variant.step.trace(*arguments).jaxpr)
    # A budget may be out of reach without donation.
    with contextlib.suppress(InfeasibleBudget):
        variant.figures_undonated, _ = _figures(variant.make(()), example.abstract_args)


def _figures(step: Any, arguments: tuple[Any, ...]) -> tuple[Figures, float]:
    """The compiler's figures of a jitted step, and the seconds of tracing, planning and compiling it."""
    started = time.perf_counter()
    compiled = step.lower(*arguments).compile()
    seconds = time.perf_counter() - started
    return read_figures(compiled, target=resolve_target(None), compile_seconds=seconds), seconds


def _train(variants: list[Variant], example: Any, steps: int, say: Say) -> None:
    """Train each variant from the same start on one batch; keep losses and differences to the first variant."""
    expected: Any = None
    for variant in variants:
        state = example.init()
        for number in range(steps):
            say(f"training, {variant.name}: step {number + 1} of {steps}")
            state, loss = variant.step(state, *example.batch())
            variant.losses.append(float(loss))
        found = jax.tree.map(_as_array, state)
        expected = found if expected is None else expected
        variant.difference = difference_of(found, expected)


def _as_array(leaf: jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)  # a copy: the next step may overwrite the buffer


def difference_of(found: Any, expected: Any) -> Difference:
    """Compare two training states of NumPy arrays, array by array and bit by bit."""
    leaves = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    parameters = zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True)
    differing = sum(one.tobytes() != other.tobytes() for one, other in leaves)
    return Difference(len(leaves), differing, _largest(leaves), _largest(parameters))


def _largest(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest difference of any element; pairs that are bit-identical, with NaNs too, have none."""
    gaps = [
        np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0)
        for one, other in pairs
        if one.tobytes() != other.tobytes()
    ]
    return float(np.max(gaps, initial=0.0))


def _time(variants: list[Variant], example: Any, runs: int, say: Say) -> None:
    """Time single steps, the variants taking turns, all on one state that goes on training."""
    state, batch = example.init(), example.batch()
    for number in range(runs):
        for variant in variants:
            say(f"timing, {variant.name}: run {number + 1} of {runs}")
            jax.block_until_ready(state)
            started = time.perf_counter()
            state, loss = variant.step(state, *batch)
            jax.block_until_ready((state, loss))
            variant.step_seconds.append(time.perf_counter() - started)


# For machines


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Everything, as values that `json.dump` writes: bytes, seconds and FLOPs, with versions and device."""
    explanation = outcome.explanation
    predicted = explanation.plan.predicted
    plain = outcome.variants[PLAIN]
    return {
        "schema": SCHEMA,
        "options": dataclasses.asdict(outcome.options),
        "versions": _versions(),
        "device": _device(),
        "parameters": outcome.parameters,
        "plan": {
            "predicted": dataclasses.asdict(predicted),
            "saved_tensors": len(explanation.held),
            "saved_bytes": explanation.held_bytes,
            "recomputed_segments": len(explanation.segments),
            "target": explanation.plan.target,
            "solver": explanation.plan.solver,
            "note": explanation.plan.note,
            "seconds": dict(explanation.seconds),
        },
        "largest_batch": outcome.largest_batch and outcome.largest_batch.as_json(),
        "variants": {name: _variant_as_json(variant, plain) for name, variant in outcome.variants.items()},
        "seconds": outcome.seconds,
    }


def _variant_as_json(variant: Variant, plain: Variant) -> dict[str, Any]:
    assert variant.figures is not None
    assert variant.flops is not None
    assert variant.difference is not None
    return {
        **variant.figures.as_json(),
        "physical_peak_bytes": variant.figures.physical_peak_bytes,
        "flops_loops_times_length": variant.flops.flops,
        "temp_bytes_undonated": variant.figures_undonated and variant.figures_undonated.temp_bytes,
        "losses": variant.losses,
        "step_seconds": variant.step_seconds,
        "median_step_seconds": variant.median_seconds,
        "step_time_ratio": time_ratio(variant, plain),
        "state_arrays": variant.difference.arrays,
        "differing_arrays": variant.difference.differing,
        "bit_identical": variant.difference.differing == 0,
        "largest_difference": variant.difference.largest,
        "largest_parameter_difference": variant.difference.largest_parameter,
    }


def time_ratio(variant: Variant, plain: Variant) -> float | None:
    """Median step time as a multiple of the plain step's; None where nothing was timed."""
    return variant.median_seconds / plain.median_seconds if plain.step_seconds else None


def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    return {"python": platform.python_version(), "remat_opt": __version__, **packages}


def _device() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "count": jax.device_count(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
