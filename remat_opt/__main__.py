"""The command line: `python -m remat_opt --help`."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remat_opt.planner.budget import InfeasibleBudget, parse_budget
from remat_opt.version import __version__

NEEDED = ("rich", "flax", "optax")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 1 where something is missing or cannot be done, 2 for wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show − or █ gets ?, not a traceback
    return given.command(given, parser)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m remat_opt",
        description="remat_opt makes a JAX training step fit in memory: it finds which tensors to save, and has XLA "
        "recompute the rest.",
    )
    parser.add_argument("--version", action="version", version=f"remat_opt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_targets(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a real network, plain and optimised side by side, and compare memory, time and results",
        description="Trains a Flax network for a few steps on generated images: the plain step, the step by "
        "remat_opt.optimize, and nn.remat round every block by hand.",
    )
    demo.add_argument(
        "--model", default="resnet50", metavar="NAME", help="a network of remat_opt.examples (default: resnet50)"
    )
    demo.add_argument("--batch", type=_positive, default=8, metavar="N", help="images in a batch (default: 8)")
    demo.add_argument("--size", type=_positive, default=128, metavar="PIXELS", help="image side (default: 128)")
    demo.add_argument("--steps", type=_positive, default=3, metavar="N", help="training steps (default: 3)")
    demo.add_argument("--runs", type=_positive, default=5, metavar="N", help="timed steps of each (default: 5)")
    demo.add_argument(
        "--budget",
        type=_budget,
        metavar="BUDGET",
        help='as of remat_opt.optimize: "800MB", "12GiB", 0.5 (of the plain step\'s temporary memory), min '
        "(default: the least memory with at most one extra forward pass)",
    )
    demo.add_argument(
        "--largest-batch",
        type=_bytes,
        metavar="BUDGET",
        help='also find the largest batch that trains in so much memory, "1GB" say; takes a minute',
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    demo.add_argument("--explain", action="store_true", help="also print what is saved, what is recomputed, and why")
    demo.set_defaults(command=_demo)


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="plan a step for a device that need not be here: what is saved, memory, time, the largest batch",
        description="Plans a training step, compiles it for the device, plain and optimised, and lists what other "
        "amounts of memory would cost. Nothing runs.",
    )
    plan.add_argument(
        "function",
        metavar="package.module:function",
        help="returns the step and a tuple of its arguments (jax.ShapeDtypeStructs are enough); with --largest-batch "
        "it is called with a batch size",
    )
    plan.add_argument("--target", metavar="NAME", help="the device; `targets` lists them (default: the attached one)")
    plan.add_argument(
        "--budget", type=_budget, metavar="BUDGET", help='"60GB", "12GiB", 0.5 (of the temporary memory) or min'
    )
    plan.add_argument(
        "--largest-batch", action="store_true", help="find the largest batch that fits, by default the device's memory"
    )
    plan.add_argument(
        "--multiple-of", type=_positive, metavar="N", help="the largest batch is a multiple of N (default: 1)"
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead")
    plan.set_defaults(command=_plan)


def _add_targets(commands: Any) -> None:
    targets = commands.add_parser(
        "targets",
        help="list the devices that steps can be planned and compiled for",
        description="Lists the devices with their memory, rates and bandwidth, and whether the compiler for each is "
        "installed; the device itself need not be here.",
    )
    targets.add_argument("--json", action="store_true", help="print JSON instead: bytes, bytes/s and FLOP/s")
    targets.set_defaults(command=_targets)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _budget(text: str) -> int | float | str:
    budget: int | float | str = text
    for kind in (int, float):
        try:
            budget = kind(text)
            break
        except ValueError:
            continue
    try:
        parse_budget(budget)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return budget


def _bytes(text: str) -> int:
    found = parse_budget(_budget(text)).physical_bytes
    if found is None:
        raise argparse.ArgumentTypeError(f'expected bytes, as "1GB" or "800MB", got {text!r}')
    return found


def _plan(given: Any, parser: argparse.ArgumentParser) -> int:
    if given.multiple_of and not given.largest_batch:
        parser.error("--multiple-of goes with --largest-batch")
    if given.largest_batch and (isinstance(given.budget, float) or given.budget == "min"):
        parser.error(f'--largest-batch needs a budget in bytes, as "60GB"; got {given.budget!r}')
    from remat_opt.plan_command import WrongStep, find_function, make_report
    from remat_opt.targets import TargetUnavailable, resolve_target

    try:
        target = resolve_target(given.target)
    except ValueError as error:
        parser.error(str(error))
    if given.largest_batch and given.budget is None and target.memory_bytes is None:
        parser.error(f"--largest-batch needs a budget for {target.name}, as --budget 8GB: its memory is the host's")
    multiple_of = (given.multiple_of or 1) if given.largest_batch else None
    try:
        report = make_report(find_function(given.function), given.target, given.budget, multiple_of)
    except WrongStep as error:
        parser.error(str(error))
    except InfeasibleBudget as error:
        print(f"the budget cannot be kept: {error}", file=sys.stderr)
        return 1
    except TargetUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(report.as_json(), indent=1) if given.json else report)
    return 0


def _targets(given: Any, parser: argparse.ArgumentParser) -> int:
    from remat_opt.report.devices import device_records, device_table
    from remat_opt.targets import TARGETS

    devices = TARGETS.values()
    print(json.dumps(device_records(devices), indent=1) if given.json else device_table(devices))
    return 0


def _demo(given: Any, parser: argparse.ArgumentParser) -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f'the demo needs {" and ".join(missing)}; write: pip install "remat_opt[examples]"', file=sys.stderr)
        return 1
    from remat_opt.examples import NETWORKS, demo, demo_tables

    if given.model not in NETWORKS:
        parser.error(f"unknown model {given.model!r}; there are {', '.join(sorted(NETWORKS))}")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"expected a folder that exists for --json, got {str(given.json)!r}")
    names = ("model", "batch", "size", "steps", "runs", "budget", "largest_batch")
    options = demo.Options(**{name: getattr(given, name) for name in names})
    try:
        with demo_tables.progress() as say:
            outcome = demo.run(options, say)
    except InfeasibleBudget as error:
        print(f"the budget cannot be kept: {error}", file=sys.stderr)
        return 1
    demo_tables.show(outcome)
    if given.explain:
        print(f"\n{outcome.explanation}")
    if given.json is not None:
        given.json.write_text(json.dumps(demo.as_json(outcome), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
