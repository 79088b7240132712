"""Temporary memory of one example network, as compilers report it: plain, `nn.remat` by hand, and ours:
`remat_opt.linen.remat` round the network, and `remat_opt.optimize` round the step.

    python -m benchmarks.compiled_memory resnet50 --batch 64 --size 224 --target h200

Nothing runs and nothing is allocated, so the device need not be here (extras `cuda-aot`, `tpu-aot`). Figures for an
absent GPU are without autotuning and its scratch memory. The step is float32, SGD with momentum, its state donated.
"""

from __future__ import annotations

import argparse
import functools
import json

import jax

from benchmarks.variants import compile_step
from remat_opt import linen, optimize
from remat_opt.examples import NETWORKS, image_classifier
from remat_opt.targets import TARGETS, Figures

VARIANTS = ("plain", "nn.remat", "linen.remat", "remat_opt")


def measure_variant(name: str, variant: str, *, batch: int, size: int, target: str) -> Figures:
    """Compile one variant of a network's training step for a target and read the compiler's figures.

    Args:
        name: one of `NETWORKS`.
        variant: one of `VARIANTS`.
        batch: images in a batch.
        size: pixels of an image's side.
        target: one of `TARGETS`.
    """
    wrap = functools.partial(linen.remat, static_argnums=2, target=target) if variant == "linen.remat" else None
    example = image_classifier(name, batch=batch, size=size, remat=variant == "nn.remat", wrap=wrap)
    jitted = jax.jit(example.train_step, donate_argnums=example.donate_argnums)
    if variant == "remat_opt":
        jitted = optimize(jitted, target=target)
    return compile_step(jitted, example, target, is_plain=variant == "plain")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=sorted(NETWORKS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--target", choices=sorted(TARGETS), default="h200")
    parser.add_argument("--json", metavar="FILE", help="write the figures of all variants to a file")
    options = parser.parse_args()
    measure = functools.partial(
        measure_variant, options.network, batch=options.batch, size=options.size, target=options.target
    )
    results: dict[str, Figures] = {}
    for variant in VARIANTS:
        figures = results[variant] = measure(variant)
        share = figures.temp_bytes / results["plain"].temp_bytes
        note = "" if figures.autotuned else " (without autotuning)"
        print(f"{variant:10} {figures.temp_bytes / 1e6:9.1f} MB  {share:6.1%} of plain{note}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({variant: figures.as_json() for variant, figures in results.items()}, file, indent=1)


if __name__ == "__main__":
    main()
