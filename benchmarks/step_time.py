"""Wall time of a step on the CPU, as a ratio to the plain step's in the same run. Times of busy machines are noisy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from benchmarks.tables import Row
from benchmarks.variants import write
from remat_opt.targets.options import compiler_options_for


def time_variants(
    row: Row, variants: Sequence[str], known: Mapping[str, Mapping[str, Any]], steps: int
) -> dict[str, float]:
    """Median time of a step of each variant over that of the plain one.

    All are compiled first and then take turns, so that whatever else the machine does meets each of them.

    Args:
        row: the network; it is initialised and runs.
        variants: their names, without "plain" or with.
        known: results of the row's variants, which a budget may speak of.
        steps: how many steps of each are timed, after one that is not.
    """
    ready: dict[str, list[Any]] = {}
    for variant in dict.fromkeys(["plain", *variants]):
        written = write(row, variant, "cpu", known)
        example, ours = written.example, written.plan is not None
        options = {} if variant == "plain" else compiler_options_for("cpu")
        lowered = written.step.lower(*example.abstract_args)
        compiled = lowered.compile() if ours else lowered.compile(compiler_options=options)
        ready[variant] = [compiled, example.init(), example.batch()]
    seconds: dict[str, list[float]] = {variant: [] for variant in ready}
    for turn in range(steps + 1):
        for variant, (compiled, state, batch) in ready.items():
            started = time.perf_counter()
            state, loss = compiled(state, *batch)
            jax.block_until_ready((state, loss))
            ready[variant][1] = state
            if turn:
                seconds[variant].append(time.perf_counter() - started)
    plain = statistics.median(seconds["plain"])
    return {variant: statistics.median(found) / plain for variant, found in seconds.items()}
