"""The process that compiles for a target: what reaches it, how it ends, and the answer where a compiler is missing."""

import os
from pathlib import Path

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
from remat_opt.targets.export import export_flat
from remat_opt.targets.remote import child_environment, shared_worker


def test_what_steers_the_parents_compilers_does_not_reach_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
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
