"""Run the demo and put its figures into README.md: `python benchmarks/refresh_readme.py`, a minute or two.

Every figure in the README stands between two comments, `<!-- NAME -->` and `<!-- end NAME -->`; this script writes what
is between them, and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from remat_opt.report.units import format_bytes, format_change

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COLUMNS = "92"


def run_demo() -> tuple[str, dict[str, Any]]:
    """What the demo prints with `--explain`, and its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "remat_opt", "demo", "--explain", "--json", str(file)]
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


def fenced(text: str) -> str:
    """Text as a block of a Markdown file, without spaces at the ends of lines."""
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    return "\n".join(["```text", *lines, "```"])


def replace_region(document: str, name: str, content: str) -> str:
    """The document with new content between the two comments of a name.

    Raises:
        ValueError: the comments are not there exactly once.
    """
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
    replaced, count = pattern.subn(lambda match: match[1] + content + "\n" + match[2], document)
    if count != 1:
        raise ValueError(
            f"expected <!-- {name} --> … <!-- end {name} --> once in {README.name}, found it {count} times"
        )
    return replaced


def main() -> None:
    """Run the demo and rewrite the README."""
    document = README.read_text(encoding="utf-8")
    for name in ("headline", "demo", "explain"):
        replace_region(document, name, "")  # a comment that is missing is told before the demo runs
    shown, figures = run_demo()
    tables, _, explanation = shown.partition("\nPlan for target")
    document = replace_region(document, "headline", headline(figures))
    document = replace_region(document, "demo", fenced(tables))
    document = replace_region(document, "explain", fenced("Plan for target" + explanation))
    README.write_text(document, encoding="utf-8")
    print(f"wrote {README}")


if __name__ == "__main__":
    main()
