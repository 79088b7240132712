"""Put the figures into README.md and docs/: those of the demo, which runs for a minute or two, of the sharded step, and
those of the kept results.

    python -m benchmarks.refresh_readme
    python -m benchmarks.refresh_readme --results    # the tables of `benchmarks/results/` alone; nothing runs

Every such figure stands between two comments, `<!-- NAME -->` and `<!-- end NAME -->`; this script writes what is
between them, and nothing else. What the examples of a page print is written by `run_pages.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import loops, on_gpu, page_figures
from benchmarks.markdown import cut_of
from benchmarks.pages import megabytes
from benchmarks.results_file import Results, file_of, load
from benchmarks.tables import SPLIT, TABLES, Row
from remat_opt.examples import EXAMPLES
from remat_opt.units import format_bytes, format_change

ROOT = Path(__file__).resolve().parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
COLUMNS = "92"

REGIONS: dict[str, tuple[Path, ...]] = {
    "headline": (README, DOCS / "index.md"),
    "short": (README,),
    "demo": (DOCS / "results" / "demo.md",),
    "explain": (DOCS / "results" / "demo.md",),
    "sharded": (DOCS / "how-to" / "sharded.md",),
    "linen_remat": (DOCS / "checkpoint.md",),
    "checkpoint_loops": (DOCS / "checkpoint.md",),
    "split_devices": (DOCS / "split.md",),
    **dict.fromkeys(("results", "loops", "split", "gpu"), (DOCS / "results" / "index.md",)),
}
"""Where the text between two comments stands, by their name."""


def run_demo() -> tuple[str, dict[str, Any]]:
    """What the demo prints with all that it can show, and its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        options = ("--explain", "--largest-batch", "1GB", "--json", str(file))
        command = [sys.executable, "-m", "remat_opt", "demo", *options]
        environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONIOENCODING": "utf-8"}
        ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True)
        return ran.stdout, json.loads(file.read_text(encoding="utf-8"))


def headline(figures: dict[str, Any]) -> str:
    """The demo in two sentences."""
    plain, optimised = figures["variants"]["plain"], figures["variants"]["remat_opt"]
    options = figures["options"]
    if optimised["bit_identical"]:
        state = f"all {optimised['state_arrays']} arrays of the training state are bit-identical to the plain step's"
    else:
        state = f"the training state differs from the plain step's by at most {optimised['largest_difference']:.1e}"
    return (
        f"A Flax {options['model'].replace('resnet', 'ResNet-')} with batch norm and momentum, "
        f"{options['batch']} images of {options['size']}×{options['size']}, {figures['device']['cores']} CPU cores, "
        f"jax {figures['versions']['jax']}: {_fall(plain, optimised, 'temp_bytes')} of temporary memory, "
        f"{_fall(plain, optimised, 'physical_peak_bytes')} with parameters and optimizer state. "
        f"A step takes {optimised['step_time_ratio']:.2f}× the plain step's time, and after {options['steps']} steps "
        f"{state}."
    )


def _fall(plain: dict[str, Any], optimised: dict[str, Any], name: str) -> str:
    before, after = plain[name], optimised[name]
    return f"{format_bytes(before)} → {format_bytes(after)} ({format_change(after, before)})"


def sharded_step() -> str:
    """The step on eight devices of `sharded_step.py`: its code, the command, and what that prints."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.sharded_step"]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return "\n".join(["```python", sharded_code(), "```", "", fenced(ran.stdout)])


def sharded_code() -> str:
    """What `sharded_step.py` does, without its import of JAX, which has to come after the number of devices is said."""
    source = (ROOT / "benchmarks" / "sharded_step.py").read_text(encoding="utf-8")
    body = source.partition('    """What the page shows."""\n')[2].partition("\n\nif __name__")[0]
    return textwrap.dedent(body).strip("\n")


def results_table() -> str:
    """The papers' tables for an H200 as they are kept, the rows that have both a plain and an optimised figure."""
    shown = {
        row: results
        for table in ("feng_huang", "chen")
        for row, results in _measured(TABLES[table], load(file_of(table, "h200")))
    }
    cuts = {row: cut_of(results) or 0.0 for row, results in shown.items()}
    theirs = [row for row in TABLES["feng_huang"] if row in shown]
    versions = sorted({result["jax_version"] for results in shown.values() for result in (results["ours"],)})
    lines = [
        "| network, batch | plain | `nn.remat` by hand | remat_opt | cut | extra FLOPs | the paper's cut | its MB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(_results_row(row, results) for row, results in shown.items()),
        *(
            _results_row(row, {**results, "ours": results[variant]}, f", budget {variant.removeprefix('ours@')}")
            for row, results in shown.items()
            for variant in ("ours@0.05",)
            if "temp_bytes" in results.get(variant, {})
        ),
        "",
        f"Temporary memory in MB, as XLA reports it for an NVIDIA H200 (jax {', '.join(versions)}; the device need not "
        "be there, so kernels are not tuned): float32, SGD with momentum, state donated, the batches and sizes of the "
        f"papers. Over the {len(theirs)} networks of Feng & Huang the mean cut is "
        f"{statistics.mean(cuts[row] for row in theirs):.0%}, the paper's "
        f"{statistics.mean(row.published.cut for row in theirs if row.published):.0%}. FLOPs are counted apart from "
        "the package; the papers give about 30 to 55 % more time. Make any row again with `python -m benchmarks.run "
        "feng_huang --target h200 --rows resnet50 --again`.",
    ]
    return "\n".join(lines)


SHORT = ("alexnet", "vgg16", "resnet50", "resnet152", "densenet121", "nasnet", "resnet1001", "lstm_scan")
SHORT += ("gpt", "gpt_scan", "gpt_1b_scan", "unet")


def short_table() -> str:
    """A few rows of all tables for an H200."""
    lines = [
        "| network, batch | plain, MB | `nn.remat` by hand | remat_opt | cut | extra FLOPs | the paper's cut |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            _results_row(row, results).rpartition(" | ")[0] + " |"
            for table in ("feng_huang", "chen", "transformers", "others")
            for row, results in _measured(TABLES[table], load(file_of(table, "h200")))
            if row.network in SHORT
        ),
    ]
    return "\n".join(lines)


def _measured(rows: Sequence[Row], results: Results) -> list[tuple[Row, dict[str, Any]]]:
    found = [(row, results.get(row.key, {})) for row in rows]
    return [(row, results) for row, results in found if cut_of(results) is not None]


def _results_row(row: Row, results: Mapping[str, Any], budget: str = "") -> str:
    plain, by_hand, ours = (results.get(name, {}).get("temp_bytes") for name in ("plain", "nn.remat", "ours"))
    published = row.published
    cells = [
        f"{row.network}, {EXAMPLES[row.network].batch}{budget}",
        *("–" if size is None else f"{size / 1e6:.0f}" for size in (plain, by_hand, ours)),
        f"{cut_of(dict(results)):.0%}",
        f"{results['ours']['extra_flops']:.0%}",
        f"{published.cut:.0%}" if published else "–",
        f"{published.optimized_mb:.0f}" if published and published.optimized_mb else "–",
    ]
    return "| " + " | ".join(cells) + " |"


def loops_table() -> str:
    """The looped networks for an H200 as they are kept."""
    results = load(loops.FILE)
    versions = sorted({result["jax_version"] for result in results.values()})
    lines = [
        "| step | plain | remat_opt | cut | extra FLOPs |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {row.key} | {megabytes(found['plain_bytes'])} | {megabytes(found['temp_bytes'])} "
            f"| {1 - found['temp_bytes'] / found['plain_bytes']:.0%} | {found['extra_flops']:.0%} |"
            for row in loops.ROWS
            if (found := results.get(row.key)) is not None
        ),
        "",
        f"Temporary memory in MB for an H200 (jax {', '.join(versions)}, state donated). The GPTs are bfloat16 with "
        "adamw, width 512: 12 layers over 8 × 512 tokens, and 64 layers over 32 × 128; the recurrent networks are "
        "float32 with adam, 64 sequences of 1,024 steps unless it says otherwise. The steps are in "
        "`benchmarks/loop_networks.py`; `python -m benchmarks.loops --again` makes the table again.",
    ]
    return "\n".join(lines)


def split_table() -> str:
    """Networks whose batch is split, for an H200, as they are kept."""
    lines = [
        "| network, batch | plain | remat_opt | chunks | no FLOPs more | the least | its extra FLOPs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for table, rows in TABLES.items():
        results = load(file_of(table, "h200"))
        for row, found in _measured(rows, results):
            for name in found:
                kind, _, chunks = name.partition("@")
                if kind == SPLIT and chunks.isdigit() and f"{name}@0.9" in found:
                    sizes = (found[one]["temp_bytes"] / 1e6 for one in ("plain", "ours", f"{name}@0.9", name))
                    plain, ours, cheap, least = (f"{size:.0f}" for size in sizes)
                    lines.append(
                        f"| {row.network}, {EXAMPLES[row.network].batch} | {plain} | {ours} | {chunks} | {cheap} "
                        f"| {least} | {found[name]['extra_flops']:.0%} |"
                    )
    lines += [
        "",
        "Temporary memory in MB for an H200, as above. Make one again with `python -m benchmarks.run feng_huang "
        "--target h200 --rows alexnet --variants split@8,split@8@0.9 --again`. FLOPs say nothing of the "
        "time: weights are read once for each chunk, and a small chunk does not fill the device.",
    ]
    return "\n".join(lines)


def gpu_table() -> str:
    """Memory and time of the steps that ran on a GPU, as they are kept."""
    results = load(on_gpu.FILE)
    shown = {"nn.remat": "`nn.remat` by hand", "ours@nn.remat": "remat_opt, as much", "ours": "remat_opt, the least"}
    devices = {f"{one['device']} (jax {one['jax_version']})" for found in results.values() for one in found.values()}
    lines = [
        "| network, batch | plain | " + " | ".join(shown.values()) + " |",
        "|---|---:|" + "---:|" * len(shown),
    ]
    rows = [row for table in TABLES.values() for row in table if {"plain", *shown} <= results.get(row.key, {}).keys()]
    for row in rows:
        found = results[row.key]
        plain = found["plain"]["step_seconds"][1]
        cells = [
            f"{found[name]['physical_peak_bytes'] / 1e6:.0f} MB, {found[name]['step_seconds'][1] / plain:.2f}×"
            for name in shown
        ]
        cells.insert(0, f"{found['plain']['physical_peak_bytes'] / 1e6:.0f} MB, {plain * 1e3:.1f} ms")
        lines.append(f"| {row.network}, {EXAMPLES[row.network].batch} | " + " | ".join(cells) + " |")
    tried = load(on_gpu.BATCHES).get("resnet50", {})
    trained = {
        name: max(int(batch) for batch, result in of.items() if "step_seconds" in result) for name, of in tried.items()
    }
    lines += [
        "",
        f"Physical peak and time of a step on an {', '.join(sorted(devices))}; "
        f"times are those of the plain step. *As much* has what `nn.remat` takes for its budget, {_by_whom(rows)}. "
        f"{_not_the_same_twice(rows)}Where JAX takes the GPU's memory at the start, as it does by default, its "
        "allocator's peak is what its compiler said. "
        f"In 24 GB of it a ResNet-50 trained with {trained['plain']} images as it is (XLA itself computes again what "
        f"does not fit), with {trained['nn.remat']} by hand and with {trained['ours']} by remat_opt; more were not "
        "tried. `python -m benchmarks.on_gpu` makes these again where a GPU is.",
    ]
    return "\n".join(lines)


def _by_whom(rows: Sequence[Row]) -> str:
    """Which compiler's word the budgets are."""
    results = load(on_gpu.FILE)
    beside = [row.network for row in rows if "attached" in (results[row.key]["ours@nn.remat"].get("checked_by") or "")]
    return f"by the compiler beside the GPU ({', '.join(beside)}) or by that for an absent one (the others)"


def _not_the_same_twice(rows: Sequence[Row]) -> str:
    """Where a plan's step took more when it was compiled again."""
    said = ""
    for row in rows:
        found = load(on_gpu.FILE)[row.key]["ours@nn.remat"]
        checked = found.get("checked_temp_bytes")
        if checked is not None and found["temp_bytes"] > 1.01 * checked:
            peak = (found["physical_peak_bytes"] - found["temp_bytes"] + checked) / 1e6
            said += (
                f"{row.network} took {peak:.0f} MB of that when it was planned, and more when another process compiled "
                "it: XLA tries kernels, and does not always choose the same ones. "
            )
    return said


def fenced(text: str) -> str:
    """Text as a block of a Markdown file, without spaces at the ends of lines."""
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    return "\n".join(["```text", *lines, "```"])


def replace_region(document: str, name: str, content: str, where: str = README.name) -> str:
    """The document with new content between the two comments of a name.

    Raises:
        ValueError: the comments are not there exactly once; the message says in which document, `where`.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: match[1] + content + "\n" + match[2], document)
    if count != 1:
        raise ValueError(f"expected <!-- {name} --> … <!-- end {name} --> once in {where}, found it {count} times")
    return replaced


def write_region(name: str, content: str) -> None:
    """Write what stands between the two comments of a name, on all pages where they stand."""
    for page in REGIONS[name]:
        document = replace_region(page.read_text(encoding="utf-8"), name, content, page.name)
        page.write_text(document, encoding="utf-8")


def main() -> None:
    """Run the demo, unless it is not wanted, and rewrite README.md and the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", action="store_true", help="the kept results only, without running the demo")
    only_results = parser.parse_args().results
    for name, pages in REGIONS.items():
        for page in pages:  # a comment that is missing is told before the demo runs
            replace_region(page.read_text(encoding="utf-8"), name, "", page.name)
    for name, make in FROM_RESULTS.items():
        write_region(name, make())
    if not only_results:
        shown, figures = run_demo()
        tables, _, explanation = shown.partition("\nPlan for target")
        write_region("sharded", sharded_step())
        write_region("headline", headline(figures))
        write_region("demo", fenced(tables))
        write_region("explain", fenced("Plan for target" + explanation))
    print(f"wrote {', '.join(sorted({page.name for pages in REGIONS.values() for page in pages}))}")


FROM_RESULTS: dict[str, Callable[[], str]] = {
    "short": short_table,
    "results": results_table,
    "loops": loops_table,
    "split": split_table,
    "gpu": gpu_table,
    "linen_remat": page_figures.linen_remat_table,
    "checkpoint_loops": page_figures.checkpoint_loops_table,
    "split_devices": page_figures.split_devices_table,
}
"""The tables that are made from the kept results, by their name."""


if __name__ == "__main__":
    main()
