"""Run the notebooks and keep their outputs: `python -m benchmarks.refresh_notebooks [resnet …]`, minutes for each.

The tests run them with smaller sizes, which replace the cell that is tagged "sizes".
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"


def read(name: str) -> NotebookNode:
    """A notebook of the repository, by name without its ending."""
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def execute(notebook: NotebookNode, sizes: str | None = None) -> NotebookNode:
    """Run a notebook in a kernel of its own, on the CPU; what was logged to standard error is not kept.

    Args:
        notebook: is left as it is.
        sizes: what replaces the cell that is tagged "sizes".

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        ValueError: there is not one cell with that tag.
    """
    notebook = copy.deepcopy(notebook)
    tagged = [cell for cell in notebook.cells if "sizes" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f'expected one cell with the tag "sizes", found {len(tagged)}')
    if sizes is not None:
        tagged[0].source = sizes
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    client = NotebookClient(notebook, timeout=3600, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(NOTEBOOKS), env=environment)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """The command line."""
    names = sorted(file.stem for file in NOTEBOOKS.glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", default=names, metavar="NAME", help=f"of {', '.join(names)}; default: all")
    for name in parser.parse_args().names:
        print(name, flush=True)
        nbformat.write(execute(read(name)), NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
