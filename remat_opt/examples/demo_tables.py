"""What the demo shows on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.table import Table

from remat_opt.examples.demo import BY_HAND, OPTIMISED, PLAIN, Difference, Outcome, Variant, time_ratio
from remat_opt.targets.options import BARRIERS_KEPT
from remat_opt.units import format_bytes, format_change, format_count, format_flops, format_seconds

COLUMNS = (PLAIN, OPTIMISED, BY_HAND)
NOTHING = "–"


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is going on in one changing line on the error stream, where that is a terminal."""
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:
        yield status.update


def show(outcome: Outcome) -> None:
    """Print the tables."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 100)  # a file or a pipe has no width of its own: lose no figure
    options, plan = outcome.options, outcome.explanation.plan
    device = jax.devices()[0]
    where = "the CPU" if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"
    console.print(
        f"{options.model}, {outcome.parameters / 1e6:.1f} million parameters, {options.batch} generated images of "
        f"{options.size}×{options.size}, SGD with momentum, on {where}, jax {jax.__version__}",
    )
    console.print(_memory(outcome))
    console.print(_training(outcome))
    for line in _sentences(outcome):
        console.print(line)
    if outcome.largest_batch is not None:
        console.print(f"\nThe largest batch:\n{outcome.largest_batch}")
    if plan.note:
        console.print(f"Note: {plan.note}.")


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(first, min_width=28)
    for name in COLUMNS:
        table.add_column(name, justify="right", style="green" if name == OPTIMISED else "", min_width=13, no_wrap=True)
    return table


def _memory(outcome: Outcome) -> Table:
    variants, plan = outcome.variants, outcome.explanation.plan
    predicted = plan.predicted
    temp = [_figure(variants[name], "temp_bytes") for name in COLUMNS]
    peak = [_figure(variants[name], "physical_peak_bytes") for name in COLUMNS]
    undonated = [variants[name].figures_undonated for name in COLUMNS]
    flops = [_figure(variants[name], "flops") for name in COLUMNS]
    counts = [count for name in COLUMNS if (count := variants[name].flops) is not None]
    table = _table("\nmemory")
    table.add_row("temporary memory, compiled", *_with_bytes(temp))
    table.add_row("  against plain", NOTHING, *(format_change(found, temp[0]) for found in temp[1:]))
    table.add_row("  as predicted", *_with_bytes([predicted.plain_peak_bytes, predicted.peak_bytes, None]))
    table.add_row("  without donating the state", *_with_bytes([found and found.temp_bytes for found in undonated]))
    table.add_row("physical peak, with the state", *_with_bytes(peak))
    table.add_row("  against plain", NOTHING, *(format_change(found, peak[0]) for found in peak[1:]))
    explanation = outcome.explanation
    saved = ("all", NOTHING) if plan.is_plain else (str(len(explanation.held)), format_bytes(explanation.held_bytes))
    table.add_row("saved tensors", "all", saved[0], NOTHING)
    table.add_row("  their bytes", NOTHING, saved[1], NOTHING)
    table.add_row(
        "extra FLOPs, by the plan",
        NOTHING,
        format_change(predicted.flops + predicted.extra_flops, predicted.flops),
        NOTHING,
    )
    table.add_row("FLOPs, loops times length", *(format_flops(count.flops) for count in counts))
    if all(flops) and not any(count.has_loops for count in counts):
        table.add_row("FLOPs, as the compiler counts", *(format_flops(found) for found in flops))
    return table


def _figure(variant: Variant, name: str) -> float:
    return getattr(variant.figures, name) or 0


def _with_bytes(counts: list[float | None] | list[float]) -> list[str]:
    return [NOTHING if count is None else format_bytes(count) for count in counts]


def _training(outcome: Outcome) -> Table:
    variants = [outcome.variants[name] for name in COLUMNS]
    table = _table("\ntraining")
    for number in range(outcome.options.steps):
        table.add_row(f"loss after step {number + 1}", *(f"{variant.losses[number]:.6f}" for variant in variants))
    table.add_row("largest parameter difference", NOTHING, *(_difference(v.difference) for v in variants[1:]))
    table.add_row("time of a step, median", *(format_seconds(variant.median_seconds) for variant in variants))
    ratios = [time_ratio(variant, variants[0]) for variant in variants]
    table.add_row("  against plain", NOTHING, *(f"{ratio:.2f}×" for ratio in ratios[1:] if ratio is not None))
    table.add_row("planning and compiling", *(format_seconds(variant.compile_seconds) for variant in variants))
    return table


def _difference(difference: Difference | None) -> str:
    if difference is None:
        return NOTHING
    return "bit-identical" if difference.differing == 0 else f"{difference.largest_parameter:.1e}"


def _sentences(outcome: Outcome) -> list[str]:
    plain, optimised = outcome.variants[PLAIN], outcome.variants[OPTIMISED]
    temp = format_change(_figure(optimised, "temp_bytes"), _figure(plain, "temp_bytes"))
    peak = format_change(_figure(optimised, "physical_peak_bytes"), _figure(plain, "physical_peak_bytes"))
    steps = format_count(outcome.options.steps, "training step")
    difference = optimised.difference
    assert difference is not None
    if difference.differing == 0:
        state = f"all {difference.arrays} arrays of the training state are bit-identical to the plain step's"
    else:
        state = (
            f"{difference.differing} of the {difference.arrays} arrays of the training state differ from the plain "
            f"step's, by at most {difference.largest:.1e}"
        )
    return [
        "",
        f"remat_opt.optimize: {temp} temporary memory, {peak} physical peak. After {steps} {state}.",
        *_how_compiled(),
        f"The demo took {format_seconds(outcome.seconds)}.",
    ]


def _how_compiled() -> list[str]:
    """What has to be known of the options that the variants were compiled with."""
    if jax.default_backend() != "cpu":
        return []
    options = ", ".join(f"{name}={setting}" for name, setting in BARRIERS_KEPT.items())
    return [f"{BY_HAND} was compiled with its barriers kept ({options})."]
