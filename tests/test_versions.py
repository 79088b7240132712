"""Which versions of JAX are taken: those that were tested, a newer one with a warning, an older one not at all."""

import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

from remat_opt.trace.supported import HIGHEST_JAX, LOWEST_JAX, check_jax_version

pytestmark = pytest.mark.short

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.11.1", "0.12.0", "0.12.9.dev20260101+abc", jax.__version__])
def test_a_version_that_was_tested_is_taken_without_a_word(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_jax_version(version)


@pytest.mark.parametrize("version", ["0.9.2", "0.4.35", "0.9.9rc1", "0.9"])
def test_an_older_version_is_refused_with_what_to_install(version: str) -> None:
    with pytest.raises(ImportError, match=rf'0\.10 to 0\.12, found {version}; write: pip install "jax>=0\.10'):
        check_jax_version(version)


@pytest.mark.parametrize("version", ["0.13.0", "0.20.1", "1.0", "2026.1.1"])
def test_a_newer_version_warns(version: str) -> None:
    with pytest.warns(UserWarning, match=rf"tested with jax 0\.10 to 0\.12, found {version}"):
        check_jax_version(version)


IMPORT_WITH = """
import sys, warnings
import jax
import jax.experimental.layout
jax.__version__ = sys.argv[1]
if sys.argv[1] < "0.10":
    del jax.experimental.layout.with_layout_constraint, jax.shard_map  # what an old one may not have
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    try:
        import remat_opt
    except ImportError as error:
        print("refused:", error)
    else:
        print("imported")
    print(*("told: " + str(one.message) for one in told if "remat_opt" in str(one.message)))
"""


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.09.9", 'refused: remat_opt needs jax 0.10 to 0.12, found 0.09.9; write: pip install "jax>=0.10,<0.13"'),
        ("0.99.0", "imported\ntold: remat_opt was tested with jax 0.10 to 0.12, found 0.99.0"),
        ("0.12.0", "imported"),
    ],
)
def test_the_import_says_so_before_it_needs_anything(version: str, expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_WITH, version], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip().startswith(expected), run.stdout + run.stderr
    assert ("told" in run.stdout) == ("told" in expected)


def test_the_package_asks_for_the_lowest_version_that_is_taken() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"jax>={LOWEST_JAX[0]}.{LOWEST_JAX[1]}" in project["dependencies"]
    assert LOWEST_JAX <= jax.__version_info__[:2] <= HIGHEST_JAX
