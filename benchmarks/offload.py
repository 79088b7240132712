"""Saved tensors on the host: what recomputation alone costs at a budget, and what it costs with copies.

    python -m benchmarks.offload                            # what has no result yet, a minute for each network
    python -m benchmarks.offload gpt_scan --target gh200
    python -m benchmarks.offload resnet50 --again

`offload_dots` is JAX's own policy round the whole network: results of products go to the host. `offload_blocks` is
`nn.remat` round every block by hand, whose input goes to the host. Results are kept in
`benchmarks/results/offload_h200.json` (or of another target), and the same as a table beside it. Nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks.pages import megabytes, page
from benchmarks.results_file import file_of, load, save
from benchmarks.tables import OFFLOAD_DOTS, Row

OFFLOAD_BLOCKS = "offload_blocks"
NETWORKS = ("resnet50", "unet", "vit_b16", "vit_b16_scan", "gpt", "gpt_scan", "transformer_base")
BUDGETS = (0.5, 0.3, 0.2, "min")


def measure_network(network: str, target: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compile the plain step, JAX's policy, and our plans with and without copies."""
    import jax

    from benchmarks.variants import compile_step, example_of

    for form in ("plain", OFFLOAD_DOTS, OFFLOAD_BLOCKS):
        by_hand = form == OFFLOAD_BLOCKS
        with mock.patch("flax.linen.remat", _remat_with_inputs_on_host) if by_hand else contextlib.nullcontext():
            example = example_of(Row(network), "nn.remat" if by_hand else form)
            step = jax.jit(example.train_step, donate_argnums=example.donate_argnums)
            figures = compile_step(step, example, target, is_plain=form == "plain")
        yield form, {"temp_bytes": figures.temp_bytes, "host_bytes": figures.host_temp_bytes, "jax": jax.__version__}
    example = example_of(Row(network))
    step = jax.jit(example.train_step, donate_argnums=example.donate_argnums)
    for budget in BUDGETS:
        for offload in (False, True):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield f"{budget} {offload}", _planned(step, example, target, budget, offload)


def _remat_with_inputs_on_host(block: Any, **options: Any) -> Any:
    """`nn.remat` of a block that names what it is called with, and a policy that offloads that name."""
    import jax
    from flax import linen as nn
    from jax.ad_checkpoint import checkpoint_name

    class Named(block):
        def __call__(self, x: Any, *args: Any) -> Any:
            return super().__call__(jax.tree.map(lambda leaf: checkpoint_name(leaf, "block"), x), *args)

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["block"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    return nn.checkpoint(Named, policy=policy, **options)


def _planned(step: Any, example: Any, target: str, budget: float | str, offload: bool) -> dict[str, Any]:
    import remat_opt

    optimized = remat_opt.optimize(step, target=target, budget=budget, offload=offload, split=False)
    try:
        plan = optimized.plan(*example.abstract_args)
    except remat_opt.InfeasibleBudget as refusal:
        return {"least_bytes": refusal.least_bytes}
    predicted = plan.predicted
    figures = plan.measured or remat_opt.measure(optimized, *example.abstract_args).optimized
    return {
        "predicted_bytes": predicted.peak_bytes,
        "temp_bytes": figures.temp_bytes,
        "predicted_host_bytes": predicted.host_bytes,
        "host_bytes": figures.host_temp_bytes,
        "extra_time": round(predicted.extra_seconds / predicted.seconds, 4),
        "jax": figures.jax_version,
    }


def to_markdown(results: dict[str, dict[str, dict[str, Any]]], target: str) -> str:
    """The results as a table."""
    return page(
        f"Saved tensors on the host, {target}",
        "Temporary memory as the compiler says, MB (10^6 bytes); time beyond the plain step's as estimated, "
        f"waiting for copies included. `{OFFLOAD_DOTS}` is `jax.checkpoint` round the network with JAX's "
        f"policy that copies the results of products, `{OFFLOAD_BLOCKS}` is `nn.remat` round every block by hand with "
        "`save_and_offload_only_these_names` for its input. Written by `python -m benchmarks.offload`.",
        [
            "network",
            "step",
            "temporary",
            "extra time",
            "with copies",
            "planned",
            "on the host",
            "planned",
            "extra time",
        ],
        ([network, *cells] for network in NETWORKS if (found := results.get(network)) for cells in _lines(found)),
    )


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    yield ["plain", megabytes(found["plain"]["temp_bytes"]), *["–"] * 6]
    for form in (OFFLOAD_DOTS, OFFLOAD_BLOCKS):
        if form in found:
            copied = (megabytes(found[form][name]) for name in ("temp_bytes", "host_bytes"))
            yield [f"`{form}`", "–", "–", next(copied), "–", next(copied), "–", "–"]
    for budget in BUDGETS:
        alone, copied = found.get(f"{budget} False", {}), found.get(f"{budget} True", {})
        names = ("temp_bytes", "predicted_bytes", "host_bytes", "predicted_host_bytes")
        yield [
            "least" if budget == "min" else f"{budget}",
            *([megabytes(alone["temp_bytes"]), f"{alone['extra_time']:.1%}"] if "jax" in alone else ["refused", "–"]),
            *((megabytes(copied[name]) for name in names) if "jax" in copied else ["refused", *["–"] * 3]),
            f"{copied['extra_time']:.1%}" if "jax" in copied else "–",
        ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="default: all")
    parser.add_argument("--target", default="h200", help="a GPU, default h200")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    file, written = file_of("offload", options.target), functools.partial(to_markdown, target=options.target)
    for network in options.networks or NETWORKS:
        if network in load(file) and not options.again:
            continue
        found = {}
        for form, one in measure_network(network, options.target):
            print(network, form, one, flush=True)
            found[form] = one
        save(file, {**load(file), network: found}, NETWORKS, written)
    print(written(load(file)))


if __name__ == "__main__":
    main()
