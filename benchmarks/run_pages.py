"""Run the Python blocks of README.md and docs/, and write what they print.

    python -m benchmarks.run_pages docs/how-to/budget.md    # runs the page
    python -m benchmarks.run_pages --check                  # all pages; compares what is printed with what they show
    python -m benchmarks.run_pages --write                  # all pages; puts what is printed into them

The blocks of a page run one after another, as a reader would type them, with the names of `page_setup.py` already
there, in an empty folder, on eight devices that the CPU stands in for. A block of text directly behind a block of
Python is what that prints, with the JAX that `WRITTEN_WITH` names: with another one compilers and graphs give other
figures, so that nothing is compared. Words are to be the same, figures within `TOLERANCE`, or within one unit of the
last digit where they are rounded to percents or decimals. Not compared are times that were measured (of compiling and
planning), versions, and the blocks that curves are drawn with.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 100  # longer lines, of errors, are wrapped
WRITTEN_WITH = "0.10"  # the JAX that Python 3.11 gets, with which .ci/run runs the whole suite
TOLERANCE = 0.02  # of a figure
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)

_CURVE = re.compile("[▁▂▃▄▅▆▇█━▼│]+")
_VERSION = re.compile(r"\b(jax[\w-]*) \d+(\.\d+)+")
_DURATION = r"(?:\d+ min )?[\d.]+ (?:µs|ms|s)\b"
_MEASURED_TIME = re.compile(rf"\bcompiling(?: {_DURATION})+|\bPlanning took:(?: [a-z ]+ {_DURATION}[,.])+")
# Digits of names (layer2, add#3, h200) are words.
_FIGURE = re.compile(r"(?<![\w#.])\d[\d,_]*(?:\.\d+)?(?:e[+-]\d+)?(?: ?%)?(?!\w)")


def pages() -> list[Path]:
    """README.md and the pages of docs/ that have a block of Python."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if BLOCK.search(page.read_text(encoding="utf-8"))]


def run(page: Path, document: str, names: Mapping[str, Any]) -> str:
    """Run a page's blocks in this process.

    Args:
        page: where the text comes from; errors point to its lines.
        document: the text.
        names: what the blocks may use without defining it.

    Returns:
        The text with what the blocks printed.

    Raises:
        ValueError: a block prints nothing, and the page says that it does.
    """
    namespace = dict(names)
    written, end = [], 0
    for block in BLOCK.finditer(document):
        lines_before = document.count("\n", 0, block.start("code"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * lines_before + block["code"], page, "exec"), namespace)
        if block["printed"] is None:
            continue
        lines = printed.getvalue().strip("\n").split("\n")
        shown = "\n".join(line.rstrip() if len(line) < WIDEST else textwrap.fill(line, WIDEST) for line in lines)
        if not shown:
            raise ValueError(f"expected the block at {page.name}, line {lines_before + 1}, to print something")
        written += [document[end : block.start("printed")], shown, "\n"]
        end = block.end("printed")
    return "".join([*written, document[end:]])


def differences(document: str, found: str) -> list[str]:
    """What a page shows otherwise than its run printed, a line for each block.

    Args:
        document: the page.
        found: the same with what its blocks printed, as `run` gives it.
    """
    blocks = zip(BLOCK.finditer(document), BLOCK.finditer(found), strict=True)
    lines = []
    for shown, printed in blocks:
        if shown["printed"] is not None and (difference := _difference(shown["printed"], printed["printed"])):
            lines.append(f"line {document.count(chr(10), 0, shown.start('printed')) + 1}: {difference}")
    return lines


def _difference(shown: str, printed: str) -> str:
    """The first word or figure that differs, with what stands before it; empty where none does."""
    pairs = itertools.zip_longest(_comparable(shown).split(), _comparable(printed).split(), fillvalue="nothing")
    before: list[str] = []
    for one, other in pairs:
        if _FIGURE.sub("0", one) != _FIGURE.sub("0", other) or not all(
            map(_are_close, _FIGURE.findall(one), _FIGURE.findall(other))
        ):
            return f"after {' '.join(before[-6:])!r} it shows {one!r}, and {other!r} is printed"
        before.append(one)
    return ""


def _comparable(text: str) -> str:
    text = " ".join(_CURVE.sub(" ", text).split())
    text = _MEASURED_TIME.sub(lambda found: re.sub(_DURATION, "…", found[0]), text)
    return _VERSION.sub(r"\1", text).replace(" %", "%")


def _are_close(one: str, other: str) -> bool:
    """Whether two figures are the same but for the tolerance, or for how they are rounded."""
    is_rounded = "%" in one or "." in one
    decimals = len(one.partition("e")[0].partition(".")[2].rstrip("%"))
    a, b = (float(re.sub("[,_%]", "", figure)) for figure in (one, other))
    unit = 10.0**-decimals if is_rounded and "e" not in one else 0.0
    return abs(a - b) <= max(TOLERANCE * max(a, b), 1.001 * unit)


def run_in_child(pages: Sequence[Path], *options: str) -> subprocess.CompletedProcess[str]:
    """Run pages one after another in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.run_pages", *map(str, pages), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def run_page(page: Path) -> tuple[str, str]:
    """A page as it is, and with what its blocks print; nothing of it is left behind."""
    from benchmarks.page_setup import jax, names

    document = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(page, document, names())
    jax.clear_caches()  # a page may say how long a compiler took
    return document, found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, help="default: all")
    parser.add_argument("--write", action="store_true", help="put what the blocks print into the pages")
    parser.add_argument("--check", action="store_true", help="compare it with what the pages show")
    options = parser.parse_args()
    from benchmarks.page_setup import jax  # it sets how many devices the CPU stands in for

    is_todays = jax.__version__.startswith(f"{WRITTEN_WITH}.")
    if options.write and not is_todays:
        parser.error(f"expected jax {WRITTEN_WITH} with --write, for figures that belong together")
    wrong = []
    for page in [page.resolve() for page in options.pages] or pages():
        print(page.relative_to(ROOT), flush=True)
        document, found = run_page(page)
        if options.write:
            page.write_text(found, encoding="utf-8")
        elif options.check and is_todays and (lines := differences(document, found)):
            wrong += [f"{page.name} does not show what it prints; see benchmarks/run_pages.py", *lines]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
