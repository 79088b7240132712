"""Steps on a mesh of eight devices: the same values and shardings, in less memory on each device."""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parent.parent


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """What `meshes.py` prints, by the name of the step. How many devices there are is said before JAX starts."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.meshes"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {one["name"]: one for one in found}


@pytest.mark.short
@pytest.mark.parametrize("name", ["data", "model", "data and model", "shard_map"])
def test_a_sharded_step_needs_less_on_each_device_and_computes_the_same(name: str) -> None:
    found = results()[name]
    assert found["devices"] == 8
    assert found["ours"] < 0.5 * found["plain"]
    assert found["difference"] < 1e-5
    assert found["same shardings"]
