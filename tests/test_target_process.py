"""The process that compiles for a target: what reaches it, how it ends, and the answer where a compiler is missing."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import pytest
from test_targets import SMALL, double

from remat_opt.targets import (
    TARGETS,
    CompilationFailed,
    TargetUnavailable,
    Worker,
    close_workers,
    measure_flat,
    remote,
    resolve_target,
)
from remat_opt.targets import worker as target_worker
from remat_opt.targets.export import export_flat
from remat_opt.targets.remote import child_environment, shared_worker


def test_what_steers_the_parents_compilers_does_not_reach_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # the parent has read its own
    for name, value in {
        "JAX_PLATFORMS": "nonsense",
        "XLA_FLAGS": "--xla_no_such_flag=true",
        "LIBTPU_INIT_ARGS": "--no_such_flag",
        "JAX_ENABLE_X64": "false",
        "JAX_COMPILATION_CACHE_DIR": "/proc/nowhere",
        "JAX_DISABLE_JIT": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("h200", "cpu"):
        target = resolve_target(name)
        with Worker(target) as worker:
            assert measure_flat(double, SMALL, target=target, worker=worker).argument_bytes == 256


def test_the_environment_of_the_child() -> None:
    parent = {"PATH": "/bin", "HOME": "/home/me", "XLA_FLAGS": "--x", "JAX_DEBUG_NANS": "1", "TPU_NAME": "mine"}
    child = child_environment(parent, ["", "/one", "/two"], None)
    assert (child["PATH"], child["HOME"], child["JAX_PLATFORMS"]) == ("/bin", "/home/me", "cpu")
    assert child["PYTHONPATH"] == os.pathsep.join(["/one", "/two"])
    assert not {"XLA_FLAGS", "JAX_DEBUG_NANS", "TPU_NAME"} & set(child)
    assert child_environment(parent, [], Path("/dump"))["XLA_FLAGS"] == "--xla_dump_to=/dump --xla_dump_hlo_as_text"


@pytest.mark.parametrize(("name", "extra"), [("h200", "cuda-aot"), ("v5e", "tpu-aot")])
def test_a_missing_compiler_is_named_with_its_extra(name: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_can_be_imported", lambda module: False)
    with pytest.raises(TargetUnavailable, match=rf'not installed.*pip install "remat_opt\[{extra}\]"'):
        measure_flat(double, SMALL, target=name)


def test_compiler_options_reach_the_child_and_its_refusal_comes_back() -> None:
    with Worker(resolve_target("cpu")) as worker:
        with pytest.raises(CompilationFailed, match="xla_no_such_option"):
            measure_flat(double, SMALL, target="cpu", worker=worker, compiler_options={"xla_no_such_option": "1"})
        assert worker.alive
        assert measure_flat(double, SMALL, target="cpu", worker=worker).argument_bytes == 256


def test_the_live_child_is_used_again_and_can_be_ended() -> None:
    target = resolve_target("h200")
    worker = shared_worker(target)
    measure_flat(double, SMALL, target=target)
    assert shared_worker(resolve_target("h100")) is worker
    close_workers()
    assert not worker.alive
    measure_flat(double, SMALL, target=target)
    assert shared_worker(target) is not worker


def test_no_kernel_is_made_twice_and_the_figures_are_the_same() -> None:
    target = resolve_target("h200")
    with Worker(target) as worker:
        folder = Path(worker._kernels.name)
        found = [measure_flat(double, SMALL, target=target, worker=worker) for _ in range(2)]
        (file,) = folder.iterdir()
        assert b"ELF" in file.read_bytes()
        made = file.stat().st_mtime_ns
        found.append(measure_flat(double, SMALL, target=target, worker=worker))
        assert file.stat().st_mtime_ns == made
    assert not folder.exists()
    without = measure_flat(double, SMALL, target=target, compiler_options={"xla_gpu_kernel_cache_file": ""})
    assert len({dataclasses.replace(one, compile_seconds=0.0) for one in (*found, without)}) == 1


class Lowered:
    """Says which options it was compiled with, and refuses some."""

    def __init__(self, refused: str):
        self.refused, self.asked = refused, []

    def compile(self, compiler_options: dict[str, Any] | None) -> list[str]:
        self.asked.append(list(compiler_options or {}))
        if self.refused in self.asked[-1]:
            raise ValueError(f"No such compile option: '{self.refused}'")
        return self.asked[-1]


def test_a_compiler_that_keeps_no_kernels_compiles_without(tmp_path: Path) -> None:
    kept, apart = "xla_gpu_kernel_cache_file", "xla_gpu_enable_llvm_module_compilation_parallelism"
    for refused, expected in (("no", [kept, apart, "xla_a"]), (apart, [kept, "xla_a"]), (kept, ["xla_a"])):
        assert target_worker._compiled(Lowered(refused), {"xla_a": 1}, str(tmp_path / "kernels")) == expected
    with pytest.raises(ValueError, match="xla_a"):
        target_worker._compiled(Lowered("xla_a"), {"xla_a": 1}, str(tmp_path / "kernels"))
    assert target_worker._compiled(Lowered("no"), {}, None) == []


def test_too_many_kernels_are_forgotten(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "kernels"
    file.write_bytes(bytes(8))
    for most, is_there in ((8, True), (7, False)):
        monkeypatch.setattr(target_worker, "_MOST_KERNEL_BYTES", most)
        target_worker._compiled(Lowered("no"), {}, str(file))
        assert file.exists() == is_there


def test_a_child_that_dies_says_its_last_words() -> None:
    target = resolve_target("h200")
    with Worker(target) as worker:
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(CompilationFailed, match="its process ended with code -9"):
            measure_flat(double, SMALL, target=target, worker=worker)


def test_a_worker_compiles_for_its_platform_only() -> None:
    program = export_flat(double, SMALL, target=TARGETS["v5e"])
    with Worker(resolve_target("h200")) as worker, pytest.raises(ValueError, match="this worker's platform 'cuda'"):
        worker.compile(program, resolve_target("v5e"))
