"""The list of devices, and the page that says how a user adds one."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_opt
from remat_opt.__main__ import main
from remat_opt.targets import TARGETS, gpu_config, remote

PAGE = Path(__file__).parent.parent / "docs" / "targets.md"


def test_the_list_has_every_device_with_its_figures_and_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["target", *TARGETS]
    h200 = next(line for line in lines if line.startswith("h200"))
    assert re.split(r"  +", h200) == [
        "h200", "151.4 GB", "989.5 TFLOP/s", "494.5 TFLOP/s", "4,800.0 GB", "55.0 GB", "installed",
        "NVIDIA H200 141GB HBM3e",
    ]  # fmt: skip


def test_a_compiler_that_is_missing_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_can_be_imported", lambda module: module == "libtpu")
    assert main(["targets"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "remat_opt[cuda-aot]" in lines["h200"]
    assert all(" installed " in lines[name] for name in ("v5e", "cpu"))
    assert main(["targets", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert not records["t4"]["compiler_is_installed"]
    assert records["v5e"]["memory_bytes"] == 16 * 2**30
    assert records["cpu"]["memory_bytes"] is None


def test_the_pages_own_device_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    def train_step(weight: jax.Array, x: jax.Array) -> jax.Array:
        return weight - jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2))(weight)

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    state, batch = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    given: dict[str, Any] = {"remat_opt": remat_opt, "train_step": train_step, "state": state, "batch": batch}
    for block in blocks:
        exec(block, given)
    assert "train_step for rtx6000ada" in capsys.readouterr().out
    assert given["half"].memory_bytes == 8 * 2**30


def test_a_capability_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a compute capability among 7\.5, 8\.0.*; got '6\.1'"):
        gpu_config(
            "old", capability="6.1", multiprocessors=20, clock_ghz=1.0, l2_bytes=1, memory_bytes=1, bandwidth=1.0
        )
