"""Steps on a mesh of eight devices: the same values and shardings, in less memory on each device, and what is
recomputed does not communicate again."""

import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from remat_opt.targets.communication import Collectives, read_collectives

CHECKOUT = Path(__file__).parent.parent


Asked = Callable[[str], dict[str, Any]]

pytestmark = pytest.mark.xdist_group("meshes")  # of one process, which compiles each step once


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """`meshes.py`, and the file of its errors. How many devices there are is said before JAX starts."""
    errors = tmp_path_factory.mktemp("meshes") / "errors.txt"
    command = [sys.executable, "-W", "ignore", "-m", "tests.meshes"]
    pipe, paths = subprocess.PIPE, _paths()
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, cwd=CHECKOUT, env=paths
        ) as running,
    ):
        yield running, errors
        assert running.stdin
        running.stdin.close()
        assert running.wait() == 0, errors.read_text()[-3000:]


def _paths() -> dict[str, str]:
    """The environment, in which test modules can be imported, too."""
    paths = [str(CHECKOUT), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture(scope="module")
def result(process: tuple[subprocess.Popen, Path]) -> Asked:
    """What `meshes.py` prints of a step."""
    running, errors = process
    names, printed = running.stdin, running.stdout
    assert names
    assert printed

    @functools.cache
    def of(name: str) -> dict[str, Any]:
        print(name, file=names, flush=True)
        line = next((line for line in printed if line.startswith("{")), None)
        assert line, f"{name}: {errors.read_text()[-3000:]}"
        found = json.loads(line)
        assert found["name"] == name
        return found

    return of


@pytest.mark.parametrize(
    "name",
    [
        "data",
        "model",
        pytest.param("data and model", marks=pytest.mark.short),
        pytest.param("shard_map", marks=pytest.mark.short),
        "model, in a loop",
        "set_mesh",
        "set_mesh, explicit axes",
        "weights by data",
        "weights by data, from its plan",
        "weights by data, half",
        "weights by data, explicit axes",
        "weights by data, in a loop",
    ],
)
def test_a_sharded_step_needs_less_on_each_device_and_computes_the_same(name: str, result: Asked) -> None:
    found = result(name)
    assert found["devices"] == 8
    assert found["ours"] < 0.5 * found["plain"]
    assert found["difference"] < 1e-5
    assert found["same shardings"]
    plain, ours = found["collectives"]
    assert 0 < ours <= plain
    if (
        "loop" not in name and "weights" not in name
    ):  # where they do not depend on how often a loop runs, they are counted here, too
        assert found["all-reduces"] == [plain, ours]


def test_the_largest_batch_is_of_all_devices_and_its_memory_of_one(result: Asked) -> None:
    found = result("largest batch")
    plain, ours = found["peaks"]
    assert found["batch"] % 64 == 0
    assert 0.85 * 4e6 < ours <= 4e6 < plain
    assert 0 < found["plain batch"] < found["batch"]
    compilations, misses = found["compilations"]
    assert compilations <= 4
    assert misses <= 2
    assert found["collectives"][1] <= found["collectives"][0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("data and model", marks=pytest.mark.short),
        "model",
        "set_mesh, explicit axes",
        "weights by data",
        "weights by data, in a loop",
        "weights by data, explicit axes",
        pytest.param("shard_map", marks=pytest.mark.short),
    ],
)
def test_a_sharded_step_in_chunks_sends_no_more_bytes(name: str, result: Asked) -> None:
    found = result(f"{name}, split")
    assert found["chunks"] == 4
    assert found["devices"] == 8
    assert found["ours"] < 0.27 * found["plain"]
    assert found["difference"] < 1e-5
    assert found["same shardings"]
    plain, ours = found["bytes sent"]
    assert 0 < ours <= plain


SENT_TWICE = 1.5  # gradients of gradients: those inside are added up over devices in a loop of their own


@pytest.mark.parametrize(
    "name",
    [
        "masked",
        "centred",
        "language_model",
        "attention",
        "convolutions",
        "dropout",
        "dropout_of_another_generator",
        "metrics",
        "scattered",
        "second_order",
        "layers, explicit axes",
        "dropout, explicit axes",
        "convolutions, explicit axes",
    ],
)
def test_chunks_of_each_device_compute_the_same_as_one_device(name: str, result: Asked) -> None:
    found = result(f"values of {name}")
    assert found["chunks of"] == 6
    assert found["difference"] < 1e-12
    assert found["exact"]
    plain, ours = found["bytes sent"]
    assert ours <= plain * (SENT_TWICE if "second" in name else 1)


def test_collectives_that_the_compiler_adds_are_repeated_where_that_is_allowed(result: Asked) -> None:
    saved, repeated = result("model"), result("model, repeated")
    assert repeated["collectives"][1] > repeated["collectives"][0] == saved["collectives"][0]
    # Value by value, the search finds as much without a repeated collective: here that is no reason to allow it.
    assert max(repeated["ours"], saved["ours"]) < 0.4 * repeated["plain"]
    assert repeated["difference"] < 1e-5


def test_weights_are_gathered_once_where_the_original_step_does_so(result: Asked) -> None:
    """Each weight is divided among the devices that the batch is divided among, too, and gathered for its product."""
    once, repeated = result("weights by data"), result("weights by data, repeated")
    assert repeated["collectives"][1] > repeated["collectives"][0] == once["collectives"][1]
    assert repeated["ours"] < once["ours"] < 0.4 * once["plain"]
    assert once["note"] == ""
    # In a loop both the repeated forward step and the backward one read a slice of the same weights.
    looped = result("weights by data, in a loop")
    assert looped["ours"] < 0.4 * looped["plain"]


@pytest.mark.parametrize("name", ["shard_map", "explicit", "explicit, in a loop"])
def test_no_explicit_collective_is_repeated(name: str, result: Asked) -> None:
    found = result(name)
    plain, ours = found["explicit collectives"]
    assert ours == plain > 0
    assert found["ours"] < 0.9 * found["plain"]
    assert found["difference"] < 1e-5
    assert found["same shardings"]


def test_explicit_collectives_are_repeated_where_that_is_allowed(result: Asked) -> None:
    found = result("explicit, repeated")
    plain, ours = found["explicit collectives"]
    assert ours > plain
    assert found["ours"] < 0.73 * result("explicit")["ours"]
    assert found["difference"] < 1e-5


@pytest.mark.parametrize(("budget", "most_extra", "compiled"), [("0.3", 0.01, 4), ("6MB", 0.01, 2), ("15MB", 0.0, 1)])
def test_a_budget_is_of_one_device_and_costs_no_more_than_it_has_to(
    result: Asked, budget: str, most_extra: float, compiled: int
) -> None:
    """Compared with what all devices hold together, each of them cost two and a half times the step's own FLOPs, or
    was met at last, after more had been compiled."""
    found = result("budgets")[budget]
    if budget.endswith("MB"):
        assert found["peak"] <= float(budget.removesuffix("MB")) * 1e6
    else:
        assert found["temporary"] <= float(budget) * found["plain temporary"]
    assert found["extra"] <= most_extra
    assert found["is plain"] == (budget == "15MB")
    assert bool(found["chunks"]) == (budget != "15MB")  # no recomputation is as cheap
    assert found["compiled"] <= compiled


COMPILED = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%body.2 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %start = (f32[4]{0:T(128)}, f32[8]{0:T(128)}) all-gather-start(%part), channel_id=2, dimensions={0}
  %done = f32[8]{0:T(128)} all-gather-done(%start)
  %inner = (s32[], f32[4]) while(%t), condition=%cond, body=%inner.3, backend_config={"known_trip_count":{"n":"2"}}
}

%inner.3 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  ROOT %sent = f32[4] collective-permute(%x), channel_id=3, metadata={op_name="jit(f)/recomputed_12_7/while/ppermute"}
}

%one (x: f32[4]) -> f32[4] {
  ROOT %exchanged = f32[4] all-to-all(%x), channel_id=4
}

%two (x: f32[4]) -> f32[4] {
  ROOT %same = f32[4] negate(%x)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %both = (f32[4]{0:T(8)(2,1)}, f32[2,2]{1,0}) all-reduce(%a, %b), metadata={op_name="(f/recomputed_3:g)"}
  %loop = (s32[], f32[4]) while(%t), condition=%cond, body=%body.2, backend_config={"known_trip_count":{"n":"5"}}
  %unknown = (s32[], f32[4]) while(%t), condition=%cond, body=%inner.3
  %chosen = f32[4] conditional(%i, %x, %x), branch_computations={%one, %two}
  ROOT %r = f32[4] copy(%both)
}
"""


def test_collectives_are_counted_one_by_one_and_as_often_as_loops_run() -> None:
    # 2 summed up together, 5 gathered, 5 · 2 + 1 sent on, 1 exchanged in a branch: of 16 bytes, gathered ones of 32.
    assert read_collectives(COMPILED) == Collectives(
        2 + 5 + 11 + 1, ((3,), (12, 7)), gathers=5, bytes=(2 + 11 + 1) * 16 + 5 * 32
    )
    assert read_collectives("") == Collectives(0)


def test_the_page_shows_the_sharded_step_as_it_runs() -> None:
    """Its code is that of the command beside it, and its memory and collectives are what that prints."""
    page = (CHECKOUT / "docs" / "how-to" / "sharded.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- sharded -->")[2].partition("<!-- end sharded -->")[0]
    code, figures = shown.split("```python\n")[1].split("\n```\n")[0], shown.split("```text\n")[1]
    source = (CHECKOUT / "benchmarks" / "sharded_step.py").read_text(encoding="utf-8")
    assert textwrap.indent(code, "    ") in source
    assert len(code.splitlines()) < 20
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.sharded_step"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=True).stdout
    row = next(line for line in printed.splitlines() if line.startswith("temporary memory"))
    assert "−" in row, "expected less memory"
    if jax.__version__ in figures:  # other versions have other figures
        assert row in figures
        assert next(line for line in printed.splitlines() if line.startswith("arrays sent")) in figures
    assert printed.splitlines()[-1] in figures
