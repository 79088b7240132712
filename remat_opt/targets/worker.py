"""The child process that compiles for a device that is not attached.

It is run by its path and imports nothing of `remat_opt`, so that it starts fast and in the same way whatever the
parent's program is. It reads requests from its standard input, one line of JSON each, followed by as many bytes of a
serialised `jax.export` program as the line says, and answers each with one line of JSON on what was its standard
output; everything else that is printed goes to its standard error.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import re
import sys
import time
from importlib import metadata
from typing import Any

# XLA's pass hlo-rematerialization names an instruction that it recomputes after the first one: `fusion.3.remat2`.
# A bitcast computes nothing.
_RECOMPUTED = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+\.remat\d*(?:\.\d+)* = (?!.* bitcast\()", re.MULTILINE)

_MOST_KERNEL_BYTES = 64 * 2**20  # XLA reads the whole file for each program
# Without it XLA before jax 0.12 keeps no kernels; a later one has no such option.
_MODULES_APART = {"xla_gpu_enable_llvm_module_compilation_parallelism": True}

_DISTRIBUTIONS = {
    "cpu": ("jaxlib",),
    "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt", "jaxlib"),
    "tpu": ("libtpu",),
}


def compiled_figures(compiled: Any, platform: str, compile_seconds: float) -> dict[str, Any]:
    """What a compiled JAX function says of itself: the fields of `Figures` that the device alone decides, and XLA's
    text where the program is divided among devices.

    XLA's `peak_memory_in_bytes` is left out: it is not reliable on every backend.
    """
    import jax

    memory = compiled.memory_analysis()
    if memory is None:
        raise ValueError(
            f"expected a compiled function whose backend reports its memory, got {type(compiled).__name__} "
            "without a memory analysis; compile for a cpu, cuda or tpu target instead"
        )
    costs = compiled.cost_analysis()
    if isinstance(costs, (list, tuple)):
        costs = costs[0] if costs else None
    flops = (costs or {}).get("flops")
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    text = compiled.as_text() if platform != "cpu" or any(one.num_devices > 1 for one in shardings) else None
    return {
        "temp_bytes": int(memory.temp_size_in_bytes),
        "argument_bytes": int(memory.argument_size_in_bytes),
        "output_bytes": int(memory.output_size_in_bytes),
        "alias_bytes": int(memory.alias_size_in_bytes),
        "host_temp_bytes": int(getattr(memory, "host_temp_size_in_bytes", 0)),
        "generated_code_bytes": int(memory.generated_code_size_in_bytes),
        # XLA answers -1 where it did not count.
        "flops": float(flops) if flops is not None and flops >= 0 else None,
        "compile_seconds": compile_seconds,
        "jax_version": jax.__version__,
        "jaxlib_version": metadata.version("jaxlib"),
        "compiler": compiler_version(platform),
        "recomputed_by_xla": 0 if platform == "cpu" else len(_RECOMPUTED.findall(text or "")),
        "text": text if any(one.num_devices > 1 for one in shardings) else None,
    }


def compiler_version(platform: str) -> str:
    """The installed distribution that holds the compiler, and its version, as "libtpu 0.0.51"."""
    for name in _DISTRIBUTIONS.get(platform, ()):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


@functools.cache
def _devices(platform: str, config: str, devices: int, nodes: int) -> Any:
    """The devices of the attached CPU, or of a topology without a device."""
    import jax
    from jax.experimental import topologies

    if platform == "cpu":
        return jax.devices("cpu")
    if platform == "cuda":
        # Its axes: partitions (what JAX calls slices), hosts in each, devices of each host.
        topology = f"{nodes}x1x{devices // nodes}"
        return topologies.get_topology_desc(platform="cuda", target_config=config, topology=topology).devices
    name, *told = config.split(",")
    options = dict(one.split("=", 1) for one in told)
    return topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices


def _shardings(exported: Any, axes: list[list[Any]], devices: Any) -> tuple[list[Any], Any]:
    """The shardings of a program's arguments and results: those it was exported with, or all on the first device."""
    import jax
    import numpy as np

    if not axes:
        mesh = jax.sharding.Mesh(np.array(devices[:1]), ("device",))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return [whole] * len(exported.in_avals), whole
    names, sizes, kinds = zip(*axes, strict=True)
    mesh = jax.make_mesh(sizes, names, tuple(jax.sharding.AxisType[kind] for kind in kinds), devices=devices)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = [whole if sharding is None else sharding for sharding in exported.in_shardings_jax(mesh)]
    return given, list(exported.out_shardings_jax(mesh))


def _compiled(lowered: Any, options: dict[str, Any], kernels: str | None) -> Any:
    """What was lowered, compiled; no kernel is made twice, for most of a program are in another form of the same step.

    Making kernels takes most of the time, and no figure depends on them.
    """
    if kernels:
        with contextlib.suppress(FileNotFoundError):
            if os.path.getsize(kernels) > _MOST_KERNEL_BYTES:
                os.remove(kernels)
        kept = {"xla_gpu_kernel_cache_file": kernels}
        for ours in ({**kept, **_MODULES_APART}, kept):
            try:
                return lowered.compile(compiler_options={**ours, **options})
            except Exception as error:
                if "No such compile option" not in str(error):
                    break  # what the compiler says without ours is the answer
    return lowered.compile(compiler_options=options or None)


def _compile(request: dict[str, Any], serialised: bytearray, devices: Any) -> dict[str, Any]:
    """Compile one exported program for the devices, and read the compiler's figures."""
    import jax

    exported = jax.export.deserialize(serialised)
    given, out_shardings = _shardings(exported, request["mesh"], devices)
    kept = range(len(exported.in_avals)) if request["keep_unused"] else exported.module_kept_var_idx
    arguments = [
        jax.ShapeDtypeStruct(exported.in_avals[i].shape, exported.in_avals[i].dtype, sharding=given[i]) for i in kept
    ]
    donated = tuple(position for position, i in enumerate(kept) if i in request["donated"])

    def program(*values):
        # The module does not read the arguments that it does not keep.
        given = dict(zip(kept, values, strict=True))
        for i, aval in enumerate(exported.in_avals):
            if i not in given:
                given[i] = jax.lax.full(aval.shape, 0, aval.dtype)
        return exported.call(*(given[i] for i in range(len(exported.in_avals))))

    jitted = jax.jit(program, donate_argnums=donated, keep_unused=True, out_shardings=out_shardings)
    lowered = jitted.lower(*arguments)
    start = time.perf_counter()
    compiled = _compiled(lowered, request["compiler_options"], request["kernels"])
    return compiled_figures(compiled, request["platform"], time.perf_counter() - start)


def _answer(request: dict[str, Any], serialised: bytearray) -> dict[str, Any]:
    """The reply to one request: the figures, or the stage that failed and its error."""
    stage = "start"
    try:
        devices = _devices(request["platform"], request["config"], request["devices"], request["nodes"])
        stage = "compile"
        return {"figures": _compile(request, serialised, devices)}
    # Whatever went wrong is the answer: the parent raises it again, and the worker lives on for the next program.
    except Exception as error:
        return {"stage": stage, "error": type(error).__name__, "message": str(error)}
    finally:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        gc.collect()


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Early, while the parent traces its program; if it fails the answer to the first request will say so.
    with contextlib.suppress(ImportError):
        import jax  # noqa: F401
    requests = sys.stdin.buffer
    while line := requests.readline():
        request = json.loads(line)
        serialised = bytearray(requests.read(request["program_bytes"]))
        if len(serialised) < request["program_bytes"]:
            return
        try:
            print(json.dumps(_answer(request, serialised)), file=replies, flush=True)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
