"""Run the Python blocks of README.md and docs/, and write what they print.

    python -m benchmarks.run_pages docs/how-to/budget.md    # runs the page
    python -m benchmarks.run_pages --write                  # all pages; puts what is printed into them

The blocks of a page run one after another, as a reader would type them, with the names of `page_setup.py` already
there, in an empty folder, on eight devices that the CPU stands in for. A block of text directly behind a block of
Python is what that prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDEST = 100  # longer lines, of errors, are wrapped
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<printed>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


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


def run_in_child(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a page in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.run_pages", str(page), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="?", type=Path, help="default: all, each in a process of its own")
    parser.add_argument("--write", action="store_true", help="put what the blocks print into the page")
    options = parser.parse_args()
    if options.page is None:
        for page in pages():
            print(page.relative_to(ROOT), flush=True)
            run_in_child(page, *(["--write"] if options.write else [])).check_returncode()
        return
    from benchmarks.page_setup import NAMES  # it sets how many devices the CPU stands in for

    page = options.page.resolve()
    document = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(page, document, NAMES)
    if options.write:
        page.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
