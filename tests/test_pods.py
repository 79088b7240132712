"""Many processes plan the same step, each for itself: they must come to the same plan, byte for byte."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parent.parent

# Prints plans of several steps; those of a step with a loop and of one on a mesh are planned in many threads at once.
SCRIPT = """
import os, sys
from benchmarks import devices_on_cpu
os.environ.update(devices_on_cpu.environment(8))
from concurrent.futures import ThreadPoolExecutor
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import remat_opt
from tests import meshes
from tests.training_steps import smaller_case
from tests.checks import planned

state = jax.eval_shape(meshes.new_state)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
specs = meshes.specs_of(state, True), P("data")
shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
x = jax.ShapeDtypeStruct((meshes.BATCH, meshes.WIDTH), jnp.float32)

def plan_of(fun, **options):
    jitted = jax.jit(fun, in_shardings=shardings, donate_argnums=0) if fun is meshes.step else jax.jit(fun)
    return planned(remat_opt.optimize(jitted, **options).plan(state, x))

def plan_of_case(name, **options):
    case = smaller_case(name)
    return planned(remat_opt.optimize(case.step, **options).plan(*case.make_args()))

for name, options in (("mlp", {"budget": 0.6}), ("dropout", {"budget": "min"}), ("checkpoint_blocks", {})):
    print(plan_of_case(name, **options))
asked = [(meshes.looped_step, {"verify": False}), (meshes.step, {})]
for fun, options in asked:
    with ThreadPoolExecutor(int(sys.argv[1])) as threads:
        plans = list(threads.map(lambda _: plan_of(fun, **options), range(int(sys.argv[1]))))
    assert len(set(plans)) == 1
    print(plans[0])
"""


def test_every_process_makes_the_same_plan_of_loops_and_of_meshes() -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, python_threads],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(CHECKOUT / "tests")]),
                "OMP_NUM_THREADS": threads,
                "OPENBLAS_NUM_THREADS": threads,
            },
            stdout=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )
        for seed, threads, python_threads in (("0", "1", "1"), ("4242", "7", "2"))
    ]
    texts = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert texts[0].count('"fingerprint"') == 5
    assert '"pair"' in texts[0], "expected a loop that is written again"
    assert texts[0] == texts[1]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


@pytest.mark.short
def test_connected_processes_agree_on_plans_and_results() -> None:
    """Two processes with four devices each run one sharded step."""
    port = str(free_port())
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.pods", port, str(number)],
            env={**os.environ, "PYTHONHASHSEED": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=CHECKOUT,
        )
        for number in range(2)
    ]
    ended = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0], ended[0][1][-2000:] + ended[1][1][-2000:]
    first, second = (result_in(text) for text, _ in ended)
    assert first["processes"] == 2
    assert first["devices"] == 8
    assert first["losses"][0] == pytest.approx(first["losses"][1], rel=1e-6)
    assert first["losses"] == second["losses"]
    assert first["plan"] == second["plan"]
    assert first["recomputes"]


def result_in(text: str) -> dict[str, Any]:
    return json.loads(next(line for line in text.splitlines() if line.startswith("{")))
