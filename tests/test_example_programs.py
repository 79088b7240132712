"""The programs of examples/ train at small sizes, in less memory than the plain step."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.devices_on_cpu import environment

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {
    "equinox_unet": "--features 8 --levels 2 --batch 4 --size 32 --steps 3",
    "jax_diffusion": "--layers 6 --width 64 --batch 1024 --steps 3",
    "linen_gpt": "--layers 4 --width 64 --batch 4 --length 64 --steps 3",
    "nnx_gpt_fsdp": "--layers 4 --width 64 --batch 16 --length 64 --steps 3",
    "nnx_classifier": "--features 8 --blocks 4 --batch 16 --size 16 --steps 3",
}


def test_every_program_is_run() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_program_trains_in_less_memory(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *SIZES[name].split()]
    devices = 8 if name.endswith("_fsdp") else 1
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment(devices)})
    assert ran.returncode == 0, ran.stderr
    assert devices == 1 or f"over {devices} devices" in ran.stdout
    (saved,) = re.findall(r"^temporary memory(?:, compiled)? {3,}.*−(\d+) %$", ran.stdout, re.MULTILINE)
    assert int(saved) >= 30
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", ran.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", SIZES)
def test_a_program_is_short_and_has_one_line_of_ours(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert text.count("remat_opt.optimize(") == 1
