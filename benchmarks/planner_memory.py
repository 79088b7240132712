"""How much memory of the host planning takes: the peak of a whole process, with JAX in it.

    python -m benchmarks.planner_memory [LAYERS …]

Each step of the residual network of `search_speed` is planned for an H200 in a process of its own, from tracing to the
plan, which is verified nowhere, so that nothing is compiled. 2220 layers make 100,000 equations.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

from benchmarks.search_speed import DEPTHS, residual_network

MIB = 2**20


def peak_bytes() -> int:
    """The most memory that this process has had (Linux counts it in units of 1024 bytes, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def plan(layers: int) -> None:
    """Plan a step in this process and print what that took."""
    import jax

    import remat_opt

    jax.devices()
    step, arguments = residual_network(layers)
    before, started = peak_bytes(), time.perf_counter()
    found = remat_opt.optimize(step, donate_argnums=0, target="h200", verify=False).plan(*arguments)
    seconds = time.perf_counter() - started
    print(
        f"{layers:6} layers {found.equations:8} equations {peak_bytes() / MIB:7.0f} MiB, of which "
        f"{before / MIB:.0f} MiB before planning {seconds:7.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("layers", nargs="*", type=int, help="numbers of layers")
    parser.add_argument("--here", action="store_true", help="plan in this process")
    asked = parser.parse_args()
    for layers in asked.layers or DEPTHS:
        if asked.here:
            plan(layers)
        else:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planner_memory", "--here", str(layers)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
