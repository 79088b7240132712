"""The notebooks run at small sizes, and what is committed of them is complete and speaks of no machine."""

import re

import pytest

from benchmarks.refresh_notebooks import NOTEBOOKS, execute, read

SIZES = {
    "resnet": """
TRAINED = {"name": "alexnet", "small": True, "batch": 16, "learning_rate": 0.02}
STEPS = 2
COMPILED = {"name": "alexnet", "small": True, "batch": 64}
TARGET = "cpu"
""",
    "densenet": """
TRAINED = {"name": "wide_resnet28_2", "small": True, "batch": 64, "size": 16, "learning_rate": 0.02}
STEPS = 2
BUDGET = 0.6
COMPILED = {"name": "alexnet", "small": True, "batch": 64}
TARGET = "cpu"
""",
    "transformer_scan": """
TRAINED = {"name": "lstm_scan", "small": True, "batch": 64, "learning_rate": 0.1}
STEPS = 2
COMPILED = {"name": "lstm_scan", "small": True, "batch": 64}
TARGET = "cpu"
""",
    "ladder": """
TRAINED = {"name": "lstm_scan", "small": True, "batch": 10, "learning_rate": 0.1}
STEPS = 2
TARGET = "cpu"
RUNGS = {
    "float32": ("float32", {"split": False, "budget": 1.0}),
    "float32, split, recomputation": ("float32", {"split": 5}),
}
""",
    "how_it_works": "LAYERS, WIDTH, EXAMPLES = 6, 64, 1024",
}
MACHINE = re.compile(r"/(home|root|work|tmp|usr|opt|Users)/|site-packages|localhost|\bFile \"")


def test_every_notebook_is_run() -> None:
    assert {file.stem for file in NOTEBOOKS.glob("*.ipynb")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_a_notebook_runs_at_small_sizes(name: str) -> None:
    found = execute(read(name), SIZES[name])
    text = "".join(output.get("text", "") for cell in found.cells for output in cell.get("outputs", []))
    assert "remat_opt" in text


@pytest.mark.parametrize("name", SIZES)
def test_the_committed_outputs_are_complete(name: str) -> None:
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not MACHINE.search(str([{**output, "data": output.get("data", {}).get("text/plain")} for output in outputs]))
    assert not any(MACHINE.search(cell.source) for cell in cells)


def test_a_notebook_without_sizes_is_refused() -> None:
    notebook = read("how_it_works")
    for cell in notebook.cells:
        cell.metadata.pop("tags", None)
    with pytest.raises(ValueError, match='one cell with the tag "sizes", found 0'):
        execute(notebook)
