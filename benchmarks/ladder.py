"""A ladder of means on an H200: low precision, chunks of the batch, recomputation, alone and together.

    python -m benchmarks.ladder                        # what has no result yet, minutes
    python -m benchmarks.ladder dynamicconv_iwslt --again

The networks and the headline are those of Sohoni et al. 2019 (arXiv 1904.10631). Their figure is of all that training
needs, and a part of it is sparsity of the weights, which XLA cannot store. Results are kept in
`benchmarks/results/ladder_h200.json`, and the same as a table in `ladder_h200.md`. Nothing runs.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.pages import megabytes, page
from benchmarks.results_file import RESULTS, load, save

TARGET = "h200"
FILE = RESULTS / f"ladder_{TARGET}.json"
IN_ORDER = 0.95  # a budget that chunks alone meet
_FOLDERS = re.compile(r"(?<=\s)/\S*/(?=[\w.]+:\d+)")  # of this machine, in errors


class Network(NamedTuple):
    """A network at the paper's batch, the chunks that its batch is split into, and the paper's headline."""

    name: str
    batch: int | None
    chunks: int
    published: float


class Rung(NamedTuple):
    """Means that are used together."""

    dtype: str
    split: bool
    recompute: bool

    @property
    def key(self) -> str:
        """Its name in the results."""
        means = [self.dtype, *(["split"] if self.split else []), *(["recomputation"] if self.recompute else [])]
        return " + ".join(means)


NETWORKS = (Network("wide_resnet28_2", 100, 10, 60.7), Network("dynamicconv_iwslt", None, 5, 8.7))
RUNGS = tuple(
    Rung(dtype, split, recompute)
    for dtype in ("float32", "bfloat16")
    for split in (False, True)
    for recompute in (False, True)
)


def measure_network(network: Network) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plan and compile every rung."""
    import jax

    from remat_opt.examples import make_example
    from tests.flop_walk import flops_of

    plain_flops = 0.0
    for rung in RUNGS:
        example = make_example(network.name, batch=network.batch, dtype=jax.numpy.dtype(rung.dtype))
        plain = jax.jit(example.train_step, donate_argnums=example.donate_argnums)
        plain_flops = plain_flops or flops_of(plain.trace(*example.abstract_args).jaxpr)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step, figures = _written(plain, example.abstract_args, network, rung)
        except ValueError as error:
            yield rung.key, {"error": _FOLDERS.sub("", str(error))}
            continue
        flops = flops_of(step.trace(*example.abstract_args).jaxpr) / plain_flops - 1
        yield (
            rung.key,
            {
                "temp_bytes": figures.temp_bytes,
                "argument_bytes": figures.argument_bytes,
                "physical_peak_bytes": figures.physical_peak_bytes,
                "extra_flops": round(flops, 4),
                "jax_version": figures.jax_version,
            },
        )


def _written(plain: Any, args: tuple, network: Network, rung: Rung) -> tuple[Any, Any]:
    """The step of a rung, and the compiler's figures."""
    import remat_opt

    budget = None if rung.recompute else IN_ORDER if rung.split else 1.0
    step = remat_opt.optimize(plain, target=TARGET, split=rung.split and network.chunks, budget=budget)
    return step, remat_opt.measure(step, *args).optimized


def to_markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The results as a table."""
    published = ", ".join(f"{one.name} {one.published}" for one in NETWORKS)
    return page(
        f"Low precision, chunks and recomputation, {TARGET}",
        "Temporary memory, arguments (parameters, momentum, the batch) and physical peak as the compiler says, MB "
        "(10^6 bytes), and how many times less the peak is than the float32 step's. The state is donated, parameters "
        f"stay float32. Sohoni et al. 2019 publish {published} times less for all means together, of which one is "
        "sparsity of the weights: XLA has no sparse arrays that take less. Written by `python -m benchmarks.ladder`.",
        ["network", "step", "temporary", "arguments", "peak", "times less", "extra FLOPs", "jax"],
        (
            [network.name, rung.key, *_cells(found[rung.key], found["float32"])]
            for network in NETWORKS
            if (found := results.get(network.name))
            for rung in RUNGS
            if rung.key in found
        ),
    )


def _cells(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    if "error" in found:
        return ["–", "–", "–", "–", "–", "the whole batch is needed" if "whole batch" in found["error"] else "error"]
    sizes = (found[name] for name in ("temp_bytes", "argument_bytes", "physical_peak_bytes"))
    less = plain["physical_peak_bytes"] / found["physical_peak_bytes"]
    return [*map(megabytes, sizes), f"{less:.1f}", f"{found['extra_flops']:+.1%}", found["jax_version"]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="default: all")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    options = parser.parse_args()
    for network in NETWORKS:
        wanted = not options.networks or network.name in options.networks
        if wanted and (network.name not in load(FILE) or options.again):
            for key, found in measure_network(network):
                print(network.name, key, found, flush=True)
                before = load(FILE)
                rungs = {**before.get(network.name, {}), key: found}
                save(FILE, {**before, network.name: rungs}, to_markdown=to_markdown)
    print(to_markdown(load(FILE)))


if __name__ == "__main__":
    main()
