"""The command line: a small demo that really trains, its JSON, and what it answers to wrong usage."""

import contextlib
import importlib.util
import io
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import remat_opt
from remat_opt import examples
from remat_opt.__main__ import main
from remat_opt.examples import NETWORKS, demo
from remat_opt.units import format_bytes

TINY = ["demo", "--model", "wide_resnet28_2", "--batch", "16", "--size", "16", "--steps", "2", "--runs", "1"]
PARAMETERS = 77_460  # of the small twin
VARIANTS = ("plain", "remat_opt", "nn.remat")

pytestmark = pytest.mark.xdist_group("demo")  # one demo runs


class Ran(NamedTuple):
    """What a small demo showed, and its JSON."""

    shown: str
    figures: dict[str, Any]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    file = tmp_path_factory.mktemp("demo") / "figures.json"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", "100")
        patch.setattr(examples, "image_classifier", partial(examples.make_example, small=True))
        assert main([*TINY, "--explain", "--largest-batch", "10MB", "--json", str(file)]) == 0
    return Ran(shown.getvalue(), json.loads(file.read_text()))


@pytest.fixture
def figures(ran: Ran) -> dict[str, Any]:
    return ran.figures


def test_the_json_says_what_ran_and_where(figures: dict[str, Any]) -> None:
    assert figures["schema"] == demo.SCHEMA
    assert figures["options"] == {
        "model": "wide_resnet28_2",
        "batch": 16,
        "size": 16,
        "steps": 2,
        "runs": 1,
        "budget": None,
        "largest_batch": 10_000_000,
    }
    assert figures["versions"].keys() >= {"python", "remat_opt", "jax", "jaxlib", "flax", "optax"}
    assert figures["device"]["platform"] == "cpu"
    assert figures["parameters"] == PARAMETERS
    assert tuple(figures["variants"]) == VARIANTS


def test_flops_are_counted_the_same_way_for_all_variants(ran: Ran) -> None:
    variants, predicted = ran.figures["variants"], ran.figures["plan"]["predicted"]
    plain, optimised, by_hand = (variants[name]["flops_loops_times_length"] for name in VARIANTS)
    assert plain == pytest.approx(predicted["flops"], rel=0.01)
    assert optimised == pytest.approx(plain + predicted["extra_flops"], rel=0.003)
    assert 1.1 * plain < by_hand < 1.5 * plain
    assert "FLOPs, loops times length" in ran.shown
    assert "FLOPs, as the compiler counts" in ran.shown  # no loops: both mean the same


def test_the_optimised_step_takes_less_memory(figures: dict[str, Any]) -> None:
    plain, optimised = figures["variants"]["plain"], figures["variants"]["remat_opt"]
    for name in ("temp_bytes", "temp_bytes_undonated", "physical_peak_bytes"):
        assert 0 < optimised[name] < plain[name]
    assert figures["plan"]["predicted"]["peak_bytes"] < figures["plan"]["predicted"]["plain_peak_bytes"]
    assert figures["plan"]["saved_tensors"] > 0
    assert figures["plan"]["saved_bytes"] > 0
    assert 0 < figures["plan"]["predicted"]["extra_flops"] < figures["plan"]["predicted"]["flops"]


def test_the_optimised_step_trains_bit_for_bit_as_the_plain_one(figures: dict[str, Any]) -> None:
    plain, optimised = figures["variants"]["plain"], figures["variants"]["remat_opt"]
    assert optimised["bit_identical"], optimised["largest_difference"]
    assert optimised["differing_arrays"] == optimised["largest_difference"] == 0
    assert optimised["state_arrays"] > 50
    assert optimised["losses"] == plain["losses"]
    assert plain["losses"][1] < plain["losses"][0]


def test_the_largest_batch_fits_where_the_plain_step_has_a_smaller_one(ran: Ran) -> None:
    largest = ran.figures["largest_batch"]
    assert largest["physical_peak_bytes"] <= largest["budget_bytes"] == 10_000_000
    assert largest["batch"] % 16 == 0
    assert largest["batch"] > largest["plain"]["batch"]
    assert "The largest batch:" in ran.shown


def test_each_variant_was_timed(figures: dict[str, Any]) -> None:
    for variant in figures["variants"].values():
        assert len(variant["step_seconds"]) == 1
        assert variant["median_step_seconds"] > 0
    assert figures["variants"]["plain"]["step_time_ratio"] == 1


def test_the_tables_show_the_same_figures(ran: Ran) -> None:
    optimised = ran.figures["variants"]["remat_opt"]
    assert f"wide_resnet28_2, {PARAMETERS / 1e6:.1f} million parameters" in ran.shown
    assert all(name in ran.shown for name in VARIANTS)
    assert format_bytes(optimised["temp_bytes"]) in ran.shown
    assert format_bytes(optimised["physical_peak_bytes"]) in ran.shown
    assert f"{optimised['losses'][-1]:.6f}" in ran.shown
    assert "bit-identical" in ran.shown
    assert "Live memory over the step" in ran.shown
    assert max(map(len, ran.shown.split("\n"))) <= 100


# Comparing states


class State(NamedTuple):
    params: Any
    momentum: Any


def test_identical_states_differ_by_nothing() -> None:
    state = State([np.array([1.0, np.nan], np.float32)], {"a": np.array([], np.int32)})
    assert demo.difference_of(state, state) == demo.Difference(2, 0, largest=0.0, largest_parameter=0.0)


def test_the_largest_difference_is_over_all_arrays() -> None:
    found, expected = State(np.array([1.0, 2.0]), np.array([3])), State(np.array([1.0, 2.5]), np.array([5]))
    assert demo.difference_of(found, expected) == demo.Difference(2, 2, largest=2.0, largest_parameter=0.5)


def test_a_nan_is_a_difference() -> None:
    difference = demo.difference_of(State(np.array([np.nan]), []), State(np.array([1.0]), []))
    assert difference.differing == 1
    assert np.isnan(difference.largest)


# Wrong usage


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_an_unknown_model_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "demo", "--model", "resnet51")
    assert "unknown model 'resnet51'" in message
    assert all(name in message for name in NETWORKS)


def test_an_unknown_command_lists_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "dmeo")
    assert "dmeo" in message
    assert "demo" in message


@pytest.mark.parametrize("budget", ["-3", "0", "1.5", "5XB"])
def test_a_wrong_budget_says_how_to_write_one(capsys: pytest.CaptureFixture[str], budget: str) -> None:
    assert "12GiB" in refused(capsys, "demo", f"--budget={budget}")


def test_a_largest_batch_is_asked_for_with_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'expected bytes, as "1GB" or "800MB", got \'0.5\'' in refused(capsys, "demo", "--largest-batch", "0.5")


@pytest.mark.parametrize("option", ["--batch", "--size", "--steps", "--runs"])
def test_counts_are_at_least_one(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert "expected a whole number of at least 1, got '0'" in refused(capsys, "demo", option, "0")


def test_a_folder_that_is_not_there_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "expected a folder that exists" in refused(capsys, "demo", "--json", str(tmp_path / "no" / "figures.json"))


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    assert "demo" in capsys.readouterr().out


def test_a_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("rich", "flax") else find(name))
    assert main(["demo"]) == 1
    message = capsys.readouterr().err
    assert "rich and flax" in message
    assert 'pip install "remat_opt[examples]"' in message


def test_a_budget_out_of_reach_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any) -> None:
        raise remat_opt.InfeasibleBudget("expected a budget of at least 5 bytes", 5)

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo", "--budget", "4"]) == 1
    assert "the budget cannot be kept: expected a budget of at least 5 bytes" in capsys.readouterr().err
