"""Figures that a page shows, that take too long for one of its examples, and that no table of the results has.

    python -m benchmarks.page_figures                  # what has no result yet, a few minutes
    python -m benchmarks.page_figures split_devices --again

Results are kept in `benchmarks/results/page_figures.json`; `python -m benchmarks.refresh_readme --results` puts them
into the pages. Nothing runs on a device that is not there.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.pages import megabytes
from benchmarks.results_file import RESULTS, load, save
from benchmarks.tables import Row

FILE = RESULTS / "page_figures.json"
ROOT = Path(__file__).resolve().parent.parent
REMAT_NETWORKS = {"resnet50": 64, "densenet121": 32}
"""Networks with their batch, for `linen.remat`."""

LOOP_NETWORKS = ("gpt_scan", "vit_b16_scan", "lstm_scan")
"""Networks whose layers or time steps are a scan, for `checkpoint` round the loss."""

MESH_STEPS = {
    "data": "batch over 8",
    "data and model": "batch over 4, weights over 2",
    "model": "weights over 2, batch whole",
    "weights by data": "batch and weights over the same 8 (FSDP)",
    "weights by data, in a loop": "the same, layers in a `scan`",
    "shard_map": "`shard_map`",
}
"""Steps of `tests/meshes.py`, with what is divided over how many devices."""


def linen_remat() -> dict[str, Any]:
    """Temporary memory under `remat_opt.linen.remat`, and what it is compared with, by network."""
    import jax

    from benchmarks.compiled_memory import VARIANTS, measure_variant

    sizes = {
        network: {
            variant: measure_variant(network, variant, batch=batch, size=224, target="h200").temp_bytes
            for variant in VARIANTS
        }
        for network, batch in REMAT_NETWORKS.items()
    }
    return {"temp_bytes": sizes, "jax": jax.__version__}


def checkpoint_loops() -> dict[str, Any]:
    """Bytes on an H200 and on its host where `remat_opt.checkpoint` stands round the loss, by network."""
    import jax

    import remat_opt
    from benchmarks.variants import compile_step, example_of

    differentiate = jax.value_and_grad

    def compiled(network: str, form: str, wrap: Callable = lambda loss: loss) -> list[int]:
        example = example_of(Row(network), form)
        with mock.patch("jax.value_and_grad", lambda loss, **options: differentiate(wrap(loss), **options)):
            step = jax.jit(example.train_step, donate_argnums=example.donate_argnums)
            figures = compile_step(step, example, "h200", is_plain=True)
        return [figures.temp_bytes, figures.host_temp_bytes]

    def rows(network: str) -> list[list[int]]:
        ours = functools.partial(remat_opt.checkpoint, target="h200")
        moving = functools.partial(ours, offload=True)
        by_jax = (compiled(network, form) for form in ("plain", "nn.remat"))
        return [*by_jax, *(compiled(network, "plain", wrap) for wrap in (ours, moving))]

    return {"rows": {network: rows(network) for network in LOOP_NETWORKS}, "jax": jax.__version__}


def split_devices() -> dict[str, Any]:
    """Steps on eight devices that the CPU stands in for, plain and in four chunks, in a process of their own."""
    import jax

    asked = [f"{step}, split" for step in MESH_STEPS]
    command = [sys.executable, "-W", "ignore", "-m", "tests.meshes", *asked]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    rows = {
        step: {"temp_bytes": [one["plain"], one["ours"]], "bytes_sent": one["bytes sent"], "chunks": one["chunks"]}
        for step, one in zip(MESH_STEPS, found, strict=True)
    }
    return {"rows": rows, "jax": jax.__version__}


def linen_remat_table() -> str:
    """For docs/checkpoint.md."""
    found = load(FILE)["linen_remat"]
    heads = ("plain", "`nn.remat` round each block", "`linen.remat` round the network", "`optimize` round the step")
    return "\n".join(
        [
            f"| network, batch | {' | '.join(heads)} |",
            "|---|" + "---:|" * len(heads),
            *(
                f"| {network}, {REMAT_NETWORKS[network]} | {' | '.join(map(megabytes, sizes.values()))} |"
                for network, sizes in found["temp_bytes"].items()
            ),
            "",
            f"Temporary memory in MB for an H200 (jax {found['jax']}; `benchmarks/compiled_memory.py`).",
        ]
    )


def checkpoint_loops_table() -> str:
    """For docs/checkpoint.md."""
    found = load(FILE)["checkpoint_loops"]
    return "\n".join(
        [
            "| network | plain | `nn.remat` round the body | `checkpoint` | with `offload=True` | on the host |",
            "|---" + "|---:" * 5 + "|",
            *(
                f"| {network} | {' | '.join(megabytes(size) for size, _ in row)} | {megabytes(row[-1][1])} |"
                for network, row in found["rows"].items()
            ),
            "",
            f"Temporary memory in MB for an H200 (jax {found['jax']}) where `checkpoint` stands round the loss.",
        ]
    )


def split_devices_table() -> str:
    """For docs/split.md."""
    found = load(FILE)["split_devices"]
    return "\n".join(
        [
            "| step | plain | in 4 chunks | sent, plain | sent, in chunks |",
            "|---|---:|---:|---:|---:|",
            *(
                f"| {MESH_STEPS[step]} | {' | '.join(f'{size / 1e6:.2f} MB' for size in row['temp_bytes'])} "
                f"| {' | '.join(f'{size / 1e3:.0f} kB' for size in row['bytes_sent'])} |"
                for step, row in found["rows"].items()
            ),
            "",
            f"Temporary memory of each of eight devices that the CPU stands in for (jax {found['jax']}), and bytes "
            "that it receives from others. The steps are in `tests/meshes.py`.",
        ]
    )


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "linen_remat": linen_remat,
    "checkpoint_loops": checkpoint_loops,
    "split_devices": split_devices,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(FIGURES), help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    for name in options.names:
        if options.again or name not in load(FILE):
            save(FILE, {**load(FILE), name: FIGURES[name]()}, FIGURES)
            print(name, load(FILE)[name], flush=True)


if __name__ == "__main__":
    main()
