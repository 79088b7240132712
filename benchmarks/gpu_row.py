"""One network on the GPU that is attached, in a process of its own: `python -m benchmarks.gpu_row`.

Started by `benchmarks.on_gpu`; reads a request as JSON from standard input and writes a line of JSON for each result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import remat_opt
from benchmarks.row import answer, find_row, said_of
from benchmarks.tables import OFFLOAD, TUNED, Row, is_planned
from benchmarks.variants import example_of, write
from remat_opt.examples import TrainingExample
from remat_opt.planner.plan import Plan
from remat_opt.targets import attached_target, read_figures

STEPS_IN_A_TURN = 4  # dispatched at once, so that the host's part of a step does not count
COMPILING_AT_ONCE = 3


class Request(NamedTuple):
    """What a process is asked for.

    Attributes:
        table: one of `TABLES`.
        key: of its row.
        variants: to be run.
        plans: folder of the plans of `benchmarks.on_gpu plan`.
        turns: how often each variant runs `STEPS_IN_A_TURN` steps for its time.
        batch: another batch than the row's; then no plans are read, and each variant takes its turns alone.
    """

    table: str
    key: str
    variants: list[str]
    plans: str
    turns: int
    batch: int | None = None


class Ready(NamedTuple):
    """A compiled step, and what its compiler says."""

    example: TrainingExample
    call: Any
    figures: dict[str, Any]


def plan_file(folder: Path, row: Row, variant: str) -> Path:
    """Where the plan of a variant is kept."""
    return folder / f"{row.key}_{variant}.json".replace(" ", "_").replace("@", "_at_")


def _lowered(row: Row, variant: str, plans: Path | None) -> tuple[TrainingExample, Any, Plan | None]:
    if not is_planned(variant) or plans is None or variant.startswith(TUNED):
        written = write(row, variant, attached_target().name, {}, verify=False)
        return written.example, written.step.lower(*written.example.abstract_args), written.plan
    example = example_of(row)
    plan = Plan.load(plan_file(plans, row, variant))
    step = remat_opt.optimize(example.train_step, plan=plan, donate_argnums=example.donate_argnums)
    return example, step.lower(*example.abstract_args), plan


def _compile(example: TrainingExample, lowered: Any, plan: Plan | None) -> Ready:
    started = time.perf_counter()
    compiled = lowered.compile()
    figures = read_figures(compiled, target=attached_target(), compile_seconds=time.perf_counter() - started)
    return Ready(
        example,
        compiled,
        {
            "temp_bytes": figures.temp_bytes,
            "physical_peak_bytes": figures.physical_peak_bytes,
            "compile_seconds": round(figures.compile_seconds, 2),
            **({} if plan is None else _promised(plan)),
        },
    )


def _promised(plan: Plan) -> dict[str, Any]:
    """What a plan says of the step's temporary memory: our model, and the compiler that checked it."""
    measured = plan.measured
    return {
        "predicted_peak_bytes": plan.predicted.peak_bytes,
        "predicted_plain_peak_bytes": plan.predicted.plain_peak_bytes,
        "checked_temp_bytes": measured and measured.temp_bytes,
        "checked_by": measured and f"{measured.target}, {'attached' if measured.autotuned else 'absent'}",
        "extra_flops": round(plan.predicted.extra_flops / plan.predicted.flops, 5),
    }


def _allocated(ready: Ready, steps: int = 2) -> tuple[int | None, list[float]]:
    """What the allocator held at most for a step alone, in bytes, and the losses.

    The allocator's peak is that since the process began: None where it was higher before, as when a kernel is chosen,
    and where a device says nothing of its allocator.
    """
    device = jax.devices()[0]
    before = device.memory_stats()
    state, batch, losses = ready.example.init(), ready.example.batch(), []
    for _ in range(steps):
        state, loss = ready.call(state, *batch)
        losses.append(float(loss))
    after = device.memory_stats()
    if before is None or after is None or after["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None, losses
    return after["peak_bytes_in_use"] - before["bytes_in_use"], losses


def _seconds(ready: Mapping[str, Ready], turns: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn but the first; all take turns, on one state where they have the same parameters:
    the largest networks leave no room for more."""
    kinds = {name: jax.tree.structure(each.example.abstract_args) for name, each in ready.items()}
    given = {kinds[name]: (each.example.init(), each.example.batch()) for name, each in ready.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(turns + 1):
        for name, each in ready.items():
            (state, batch), loss = jax.block_until_ready(given.pop(kinds[name])), None
            started = time.perf_counter()
            for _ in range(STEPS_IN_A_TURN):
                state, loss = each.call(state, *batch)
            jax.block_until_ready((state, loss))
            given[kinds[name]] = state, batch
            if turn:
                seconds[name].append((time.perf_counter() - started) / STEPS_IN_A_TURN)
    return seconds


def measure(request: Request) -> Iterator[dict[str, Any]]:
    """`{"variant": …, "result": …}` for each; a failure is a result, too."""
    row = find_row(request.table, request.key)
    about = {"device": jax.devices()[0].device_kind, "jax_version": jax.__version__}
    plans = Path(request.plans)
    if request.batch is not None:
        row, plans = dataclasses.replace(row, batch=request.batch), None
    with _turn(fcntl.LOCK_SH):
        ready, failed = compile_all(row, request.variants, plans)
    with _turn(fcntl.LOCK_EX):
        results, seconds = _run(ready, failed, request.turns)
    if any(variant.startswith(OFFLOAD) for variant in results):
        about["host_bandwidth"] = _host_bandwidth()
    for variant in request.variants:
        if variant in failed:
            yield {"variant": variant, "result": {"error": failed[variant], **about}}
        else:
            found = seconds[variant]
            spread = [round(each, 6) for each in (min(found), statistics.median(found), max(found))]
            yield {"variant": variant, "result": {**results[variant], "step_seconds": spread, **about}}


def _host_bandwidth(size: int = 2**30) -> list[float]:
    """Bytes per second of one large copy to the host's pinned memory, and of one back."""
    device = jax.devices()[0]
    here, there = (jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    found, array = [], jax.device_put(jnp.zeros(size, jnp.int8), here)
    jax.block_until_ready(jax.device_put(array, there))  # which takes the host's memory
    for place in (there, here):
        started = time.perf_counter()
        array = jax.block_until_ready(jax.device_put(array, place))
        found.append(size / (time.perf_counter() - started))
    return found


@contextlib.contextmanager
def _turn(kind: int) -> Iterator[None]:
    """Processes compile side by side, which tries kernels on the GPU; then their steps run, one process at a time."""
    with open(Path(tempfile.gettempdir()) / "remat_opt_gpu.lock", "w") as lock:
        fcntl.flock(lock, kind)
        yield


def _run(
    ready: Mapping[str, Ready], failed: dict[str, str], turns: int
) -> tuple[dict[str, dict[str, Any]], dict[str, list[float]]]:
    """What each variant takes, and its seconds; adds to `failed` what the device has no room for."""
    results: dict[str, dict[str, Any]] = {}
    # The allocator's peak never falls, so the smallest comes first.
    for variant in sorted(ready, key=lambda name: ready[name].figures["physical_peak_bytes"]):
        try:
            allocated, losses = _allocated(ready[variant])
        except jax.errors.JaxRuntimeError as error:
            failed[variant] = said_of(error)
        else:
            results[variant] = {**ready[variant].figures, "allocated_bytes": allocated, "losses": losses}
    return results, _seconds({variant: ready[variant] for variant in results}, turns)


def compile_all(row: Row, variants: Sequence[str], plans: Path | None) -> tuple[dict[str, Ready], dict[str, str]]:
    """The variants that compile, and what is said of those that do not."""
    ready, failed = {}, {}
    with ThreadPoolExecutor(COMPILING_AT_ONCE) as pool:
        waiting = {}
        for variant in variants:
            try:
                waiting[variant] = pool.submit(_compile, *_lowered(row, variant, plans))
            except Exception as error:  # one variant's failure is told in the table, and the others are measured
                failed[variant] = said_of(error)
        for variant, compiling in waiting.items():
            try:
                ready[variant] = compiling.result()
            except Exception as error:
                failed[variant] = said_of(error)
    return ready, failed


if __name__ == "__main__":
    answer(lambda asked: measure(Request(**asked)))
