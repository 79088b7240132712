"""Temporary memory as our model predicts it against what compilers report, plain and optimised, network by network.

    python -m benchmarks.predicted_memory                      # all rows that have no result yet
    python -m benchmarks.predicted_memory --target h200 --network resnet50 --again
    python -m benchmarks.predicted_memory --replan            # predictions alone, where plans are as they were

Each row is compiled in a process of its own and kept in `benchmarks/results/predicted_memory.json` as soon as it is
there, so that a run can be stopped and taken up again; `predicted_memory.md` is the same as a table. Nothing runs and
nothing is allocated; the devices need not be here (extras `cuda-aot`, `tpu-aot`). Steps are float32, SGD with momentum,
the state donated; the tests' steps (`tests/training_steps.py`) and those of `unseen/` are as they are there. A plain
step is compiled as `jax.jit` would.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results_file
from benchmarks.pages import NETWORK, megabytes, page
from benchmarks.results_file import RESULTS, load

ACCELERATORS = ("h200", "v5e")


class Row(NamedTuple):
    """One network on one target, with the batch and size of `remat_opt.examples`, or one of the tests' steps."""

    network: str
    batch: int | None
    size: int | None
    target: str

    @property
    def name(self) -> str:
        """The network with its sizes."""
        return self.network if self.batch is None else f"{self.network}, {self.batch}, {self.size}"

    @property
    def key(self) -> str:
        """Its name in the results."""
        return f"{self.name} {self.target}"


_SIZES = (
    ("alexnet", 1024, 224),
    ("vgg11", 64, 224),
    ("vgg16", 64, 224),
    ("resnet18", 256, 224),
    ("resnet50", 64, 224),
    ("resnet152", 16, 224),
    ("densenet121", 32, 224),
    ("densenet201", 16, 224),
    ("inception_v3", 32, 300),
    ("darts", 64, 32),
    ("wide_resnet28_2", 128, 32),
    ("unet", 8, 572),
    ("vit_b16", 64, 224),
    ("gpt", 8, 512),
    ("gpt_scan", 8, 512),
    ("lstm_scan", 64, 1000),
    ("transformer_base", 100, 32),
)
_ON_THE_CPU = (
    ("alexnet", 32, 224),
    ("vgg11", 4, 128),
    ("vgg16", 4, 128),
    ("resnet18", 8, 128),
    ("resnet50", 8, 128),
    ("resnet152", 4, 128),
    ("densenet121", 8, 128),
    ("inception_v3", 4, 300),
    ("wide_resnet28_2", 32, 32),
    ("unet", 1, 284),
    ("vit_b16", 4, 224),
    ("gpt_scan", 2, 512),
    ("lstm_scan", 16, 1000),
    ("transformer_base", 10, 32),
)
_STEPS = (
    *("mlp", "conv_net", "u_net", "gan", "transformer", "dropout", "nnx", "nnx_jit", "equinox", "vjp", "has_aux"),
    *("checkpoint_blocks", "checkpoint_policy", "hand_written_attention", "random_wiring", "mixed_precision"),
    *("keyword_and_static", "micro_batches"),
)
_UNSEEN = (
    *("mamba", "dlrm", "graph_attention", "speech", "points", "two_views"),
    *("moe", "perceiver", "chunked_loss", "neural_ode", "wavenet", "learning_to_learn"),
    *("fourier_operator", "gradient_penalty", "private", "automaton", "long_convolution", "capsules"),
    *("equilibrium", "splines"),
)
ROWS = (
    *(Row(network, batch, size, "cpu") for network, batch, size in _ON_THE_CPU),
    *(Row(network, batch, size, target) for target in ACCELERATORS for network, batch, size in _SIZES),
    *(Row(f"steps/{step}", None, None, target) for target in ("cpu", *ACCELERATORS) for step in _STEPS),
    *(Row(f"unseen/{name}", None, None, target) for target in ("cpu", *ACCELERATORS) for name in _UNSEEN),
)


def load_step(row: Row) -> tuple[Callable[..., Any], tuple, dict[str, Any], dict[str, Any]]:
    """A row's step, its arguments, and options of `jax.jit`."""
    if row.network.startswith("steps/"):
        sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
        steps = importlib.import_module("training_steps").STEPS

        case = steps[row.network.removeprefix("steps/")]()
        return case.step, case.make_args(), case.make_kwargs(), {}
    if row.network.startswith("unseen/"):
        from benchmarks.unseen import NETWORKS

        unseen = NETWORKS[row.network.removeprefix("unseen/")]()
        return unseen.step, unseen.abstract_args, {}, {"donate_argnums": unseen.donate_argnums}
    from remat_opt.examples.registry import make_example

    example = make_example(row.network, batch=row.batch, size=row.size)
    return example.train_step, example.abstract_args, {}, {"donate_argnums": example.donate_argnums}


def measure_row(row: Row) -> dict[str, Any]:
    """Plan and compile one row, in this process."""
    import remat_opt

    given, args, kwargs, options = load_step(row)
    step = remat_opt.optimize(given, target=row.target, **options)
    started = time.perf_counter()
    plan = step.plan(*args, **kwargs)
    predicted = plan.predicted
    planned = time.perf_counter() - started
    import jax

    plain = jax.jit(given, **options) if options else given
    found = remat_opt.measure(plain, *args, target=row.target, **kwargs)
    return {
        **row._asdict(),
        **({"walked_extra_flops": walked(plain, step, args)} if row.batch is not None else {}),
        "predicted": {"plain": predicted.plain_peak_bytes, "optimized": predicted.peak_bytes},
        "extra_flops": predicted.extra_flops / predicted.flops,
        "as_given": plan.is_plain,
        "planning_seconds": round(planned, 2),
        "measured": {
            "plain": found.plain.as_json() if found.plain is not None else None,
            "optimized": found.optimized.as_json() if found.optimized is not None else None,
        },
    }


def predict_row(row: Row, kept: dict[str, Any]) -> dict[str, Any]:
    """A row with the predictions of today, and what was compiled, if its plan is the one that was: as many FLOPs to the
    last digit. What runs as it was given now takes what that takes. Else plan and compile it again."""
    import remat_opt

    given, args, kwargs, options = load_step(row)
    step = remat_opt.optimize(given, target=row.target, verify=False, **options)
    plan = step.plan(*args, **kwargs)
    predicted = plan.predicted
    found = {"plain": predicted.plain_peak_bytes, "optimized": predicted.peak_bytes}
    as_given = kept.get("as_given", kept["extra_flops"] == 0.0)
    if plan.is_plain and not as_given and row.target != "cpu":  # which has options of ours, the others have none
        unchanged = {**kept["measured"], "optimized": kept["measured"]["plain"]}
        kept, as_given = {**kept, "measured": unchanged, "extra_flops": 0.0}, True
    if as_given and not plan.reordered:  # nothing was to gain, maybe by the compiler's word
        found["optimized"] = found["plain"]
    elif as_given or kept["extra_flops"] != predicted.extra_flops / predicted.flops:
        return measure_row(row)
    return {**kept, "as_given": as_given, "predicted": found}


def walked(plain: Any, step: Any, args: tuple) -> float:
    """Extra FLOPs as a part of the plain step's, counted over what is written, apart from the package."""
    from remat_opt.trace import compat
    from tests.flop_walk import flops_of

    before, after = (flops_of(compat.without_dead_code(one.trace(*args).jaxpr)) for one in (plain, step))
    return round(after / before - 1, 5)


def errors_of(results: dict[str, dict]) -> list[float]:
    """Relative errors of all predictions, without sign."""
    pairs = [
        (result["predicted"][step], figures["temp_bytes"])
        for result in results.values()
        for step, figures in result["measured"].items()
        if figures is not None
    ]
    return [abs(predicted - measured) / measured for predicted, measured in pairs]


def to_markdown(results: dict[str, dict]) -> str:
    """All results as a table, MB of temporary memory."""
    summary = ""
    if errors := errors_of(results):
        summary = f"{len(errors)} predictions: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}."
    return page(
        "Predicted and compiled temporary memory",
        "MB (10^6 bytes), float32, SGD with momentum, state donated (the tests' steps as they are); written by "
        "`python -m benchmarks.predicted_memory`. Figures for an absent GPU are without autotuning. Extra FLOPs are "
        "the plan's; beside them those of the step that is written, counted by a walk over it.",
        [
            *(NETWORK, "target", "plain: predicted", "compiled", "error", "optimised: predicted", "compiled", "error"),
            *("against plain", "extra FLOPs", "counted", "compiler"),
        ],
        map(_cells, results.values()),
        summary,
    )


def _cells(result: dict[str, Any]) -> list[str]:
    """One line of the table."""
    row = Row(*(result[field] for field in Row._fields))
    cells = [row.name, row.target]
    for step in ("plain", "optimized"):
        figures, predicted = result["measured"][step], result["predicted"][step]
        cells.append(megabytes(predicted))
        if figures is None:
            cells += ["does not fit", "–"]
            continue
        measured = figures["temp_bytes"]
        cells += [megabytes(measured), f"{(predicted - measured) / measured:+.0%}"]
    plain, optimized = (result["measured"][step] for step in ("plain", "optimized"))
    if plain is not None and optimized is not None:
        cells.append(f"{optimized['temp_bytes'] / plain['temp_bytes']:.0%}")
    else:
        cells.append("–")
    cells.append(f"{result['extra_flops']:.0%}")
    cells.append(f"{result['walked_extra_flops']:.1%}" if "walked_extra_flops" in result else "")
    cells.append((optimized or plain or {}).get("compiler", "–"))
    return cells


def save(results: dict[str, dict], file: Path) -> None:
    """Write results, and the table beside them, in the order of `ROWS`."""
    results_file.save(file, results, (row.key for row in ROWS), to_markdown)


def run_in_process(row: Row, kept: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """`measure_row`, or with what is kept `predict_row`, in a process of its own; None where that fails."""
    command = [sys.executable, "-m", "benchmarks.predicted_memory", "--row", json.dumps([row, kept])]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        print(finished.stderr[-2000:], file=sys.stderr)
        return None
    return json.loads(finished.stdout.splitlines()[-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", help="this network only")
    parser.add_argument("--target", help="this target only")
    parser.add_argument("--again", action="store_true", help="also rows that have a result")
    parser.add_argument("--replan", action="store_true", help="predict again; compile only what is planned otherwise")
    parser.add_argument("--results", type=Path, default=RESULTS / "predicted_memory.json")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        fields, kept = json.loads(options.row)
        print(json.dumps(predict_row(Row(*fields), kept) if kept else measure_row(Row(*fields))))
        return
    for row in ROWS:
        wanted = options.network in (None, row.network) and options.target in (None, row.target)
        kept = load(options.results).get(row.key)
        if not wanted or (kept and not options.again and not options.replan):
            continue
        print(row.key, flush=True)
        result = run_in_process(row, kept if options.replan else None)
        if result is not None:
            save({**load(options.results), row.key: result}, options.results)
    print(to_markdown(load(options.results)))


if __name__ == "__main__":
    main()
