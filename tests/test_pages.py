"""README.md and docs/: their examples run, what they show is there, and the reference is complete."""

import re
from pathlib import Path

import pytest

import remat_opt
from benchmarks.run_pages import BLOCK, ROOT, differences, pages, run, run_in_child

DOCS = ROOT / "docs"
FENCE = re.compile(r"^ *```+ *python", re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("part", [0, 1])  # a process each: what it imports and the compilers it starts serve all pages
def test_the_examples_of_a_page_run_and_print_what_it_shows(part: int) -> None:
    ran = run_in_child(pages()[part::2], "--check")
    assert ran.returncode == 0, ran.stderr


def test_no_block_of_python_is_left_out() -> None:
    """A block that the runner does not see, since it is indented or has options, would never run."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert len(FENCE.findall(text)) == len(BLOCK.findall(text)), name_of(page)


def test_what_a_block_prints_is_written_behind_it() -> None:
    shown = run(Path("page.md"), "```python\nprint(1 + 1)\n```\n\n```text\nold\n```\n\nend\n", {})
    assert shown == "```python\nprint(1 + 1)\n```\n\n```text\n2\n```\n\nend\n"


def test_a_block_that_prints_nothing_and_says_so_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the block at page.md, line 2, to print something"):
        run(Path("page.md"), "```python\n1\n```\n\n```text\nold\n```\n", {})


SHOWN = """
```python
report()
```

```text
step for h200, jax 0.10.2, jaxlib 0.10.2

temporary memory           163.8 MB      23.3 MB    −86 %
compiling                    678 ms       1.78 s
12 ops of layer2/add#3 in 5 segments take 0.1 % of 2,000 MB and 2.23e+09 FLOPs
   ▄▅▅█ after
Planning took: tracing 69.9 ms, timing plans 2 min 05 s.
```
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("163.8 MB", "165.8 MB"),
        ("−86 %", "−85 %"),
        ("0.1 %", "0.2 %"),
        ("2.23e+09", "2.24e+09"),
        ("2,000 MB", "1,990 MB"),
        ("678 ms       1.78 s", "23 µs  2 min 05 s"),
        ("69.9 ms", "1.1 s"),
        ("jax 0.10.2, jaxlib 0.10.2", "jax 0.10.3, jaxlib 0.10.3"),
        ("▄▅▅█", "▄▅█▅█"),
        ("163.8 MB      23.3", "163.8   MB 23.3"),
    ],
)
def test_figures_may_differ_a_little_and_times_and_versions_at_will(old: str, new: str) -> None:
    assert old in SHOWN
    assert differences(SHOWN, SHOWN.replace(old, new)) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("163.8 MB", "168.8 MB"),
        ("163.8 MB", "163.8 kB"),
        ("−86 %", "−83 %"),
        ("−86 %", "+86 %"),
        ("in 5", "in 6"),
        ("layer2", "layer3"),
        ("add#3", "add#4"),
        ("temporary", "physical"),
        ("tracing", "searching"),
        ("2.23e+09", "2.23e+08"),
        (" and 2.23e+09 FLOPs", ""),
        ("h200", "h100"),
    ],
)
def test_other_words_and_figures_are_told(old: str, new: str) -> None:
    assert old in SHOWN
    (line,) = differences(SHOWN, SHOWN.replace(old, new))
    assert line.startswith("line 7: after ")


def test_errors_point_to_the_line_of_the_page() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        run(Path("page.md"), "text\n\n```python\n1 / 0\n```\n", {})
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno) == ("page.md", 3)


def test_the_reference_has_every_public_name() -> None:
    shown = {
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: remat_opt\.(\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {name for name in shown if "." not in name} == set(remat_opt.__all__)
    assert {"linen.remat", "nnx.remat", "targets.Target", "targets.resolve_target"} <= shown


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_links_lead_somewhere_in_the_repository() -> None:
    """On the site they are checked by `mkdocs build --strict`."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{name_of(page)}: {link}"


def test_pages_that_the_code_names_exist() -> None:
    for file in (ROOT / "remat_opt").rglob("*.py"):
        for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{file.name} names {name}"
