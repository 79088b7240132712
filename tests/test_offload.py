"""`offload=True`: values that go to the host's memory and back; what the model, the search, the writer and the compiler
make of them."""

import dataclasses
import functools
import json
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import by_jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from numpy_ops import apply_in_numpy
from op_by_op import bits, run_op_by_op
from training_steps import smaller_case

import remat_opt
from remat_opt import Plan, PlanError, RematWarning, optimize
from remat_opt.graph.barriers import barriers
from remat_opt.graph.graph import Graph, Op
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, Transfer
from remat_opt.graph.transfers import check_transfers, host_peak, stalls
from remat_opt.planner.prepared import Prepared
from remat_opt.search import Problem, search_of, stays
from remat_opt.search.offload import Fetches, OffloadSearch
from remat_opt.search.stays import Stays
from remat_opt.targets import Target, resolve_target

MB = 1 << 20
H200 = resolve_target("h200")


def with_link(bandwidth: float, target: str = "cpu") -> Target:
    return dataclasses.replace(resolve_target(target), host_bandwidth=bandwidth)


def there_and_back(layers: int, size: int = MB) -> Graph:
    """A chain of layers and its backward pass: the gradient of layer i reads what the layer made."""
    ops = [Op((i - 1,) if i else (), (i,), seconds=1.0, flops=1.0) for i in range(layers)]
    for number in range(layers):
        ops.append(Op((layers - 1 + number, layers - 1 - number), (layers + number,), seconds=1.0, flops=1.0))
    return Graph((*[size] * (2 * layers),), tuple(ops), outputs=(2 * layers - 1,), fused=True)


# The model


def test_a_value_on_the_host_takes_no_memory() -> None:
    graph = there_and_back(4)
    order = tuple(range(8))
    plain = simulate(graph, Schedule((Run(order),)))
    moved = simulate(graph, Schedule((Run(order),), (Transfer(2, 6, 0),)))
    assert (plain.live - moved.live).tolist() == [0, 0, MB, MB, MB, MB, 0, 0, 0]
    assert [buffer.value for buffer in moved.at(3)] == [1, 2, 3]


def test_a_place_at_a_recomputed_run_stands_before_its_barrier() -> None:
    graph = there_and_back(3)
    runs = (Run((0, 1, 2, 3)), Run((1,), recomputed=True), Run((4, 5)))
    plain, moved = (simulate(graph, Schedule(runs, one)) for one in ((), (Transfer(2, 4, 0),)))
    # Positions: 0, 1, 2, 3, the barrier, the repeat, 4, 5, the return.
    assert (plain.live - moved.live).tolist() == [0, 0, MB, MB, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("bandwidth", "seconds"),
    [(MB, 0.0), (MB / 2, 1.0), (MB / 4, 5.0)],  # a copy takes 1, 2 and 4 seconds
)
def test_what_a_copy_takes_beyond_the_work_beside_it_is_a_stall(bandwidth: float, seconds: float) -> None:
    # Out beside op 1, which takes one second; back beside ops 5 and 6.
    schedule = Schedule((Run(tuple(range(8))),), (Transfer(2, 5, 0),))
    assert stalls(there_and_back(4), schedule, bandwidth) == pytest.approx(seconds)


def test_copies_of_one_queue_follow_one_another() -> None:
    graph = there_and_back(4)
    schedule = Schedule((Run(tuple(range(8))),), (Transfer(3, 6, 0), Transfer(3, 5, 1)))
    # Out: value 0 in [1, 3], value 1 in [3, 5] instead of [2, 4], so that op 3 begins at 5. Back: value 1 in [7, 9],
    # for op 6, which was to begin at 8; value 0 from 9 to 11, for op 7, which was to begin at 10.
    assert stalls(graph, schedule, MB / 2) == pytest.approx(2 + 1 + 1)
    assert host_peak(graph, schedule) == 2 * MB


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        (Transfer(3, 7, 1), "reads while it is away"),
        (Transfer(0, 3, 0), "places in first runs"),
        (Transfer(4, 3, 0), "the way back later"),
        (Transfer(2, 4, 3), "made before it goes"),
        (Transfer(2, 4, 99), "made before it goes"),
        (Transfer(5, 7, 4), "no results of the step"),
    ],
)
def test_transfers_that_do_not_fit_the_schedule_are_refused(transfer: Transfer, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_transfers(
            dataclasses.replace(there_and_back(4), outputs=(4, 7)), Schedule((Run(tuple(range(8))),), (transfer,))
        )


def test_a_value_may_go_twice_but_not_while_it_is_away() -> None:
    graph = there_and_back(4)
    schedule = Schedule((Run(tuple(range(8))),), (Transfer(2, 4, 0), Transfer(5, 7, 0)))
    check_transfers(graph, schedule)
    assert host_peak(graph, schedule) == MB
    with pytest.raises(ValueError, match="come back"):
        check_transfers(graph, dataclasses.replace(schedule, transfers=(Transfer(2, 6, 0), Transfer(5, 7, 0))))


# The search


def test_a_fetch_stands_for_a_copy_on_the_host() -> None:
    graph = there_and_back(3)
    fetches = Fetches(graph, [0], MB)
    stay = Stays(Problem(graph).plain).every[0]
    assert (stay.value, stay.start, stay.stop) == (0, 2, 5)
    schedule = fetches.schedule((Run(tuple(range(6))),), [stay])
    lives = simulate(fetches.problem.graph, schedule)
    assert lives.peak == simulate(graph, Schedule((Run(tuple(range(6))),), (Transfer(2, 5, 0),))).peak
    assert fetches.original(schedule) == ((Run(tuple(range(6))),), [(0, 5)])


@pytest.mark.parametrize("layers", [6, 9])
@pytest.mark.parametrize("seconds", [0.1, 0.7, 3.0])  # of one copy; an op takes one
def test_a_budget_with_transfers_takes_no_longer_than_without(layers: int, seconds: float) -> None:
    graph = there_and_back(layers)
    problem, alone = Problem(graph, host_bandwidth=MB / seconds), Problem(graph)
    for budget in range(3 * MB, layers * MB, MB):
        found, without = search_of(problem).within(budget), search_of(alone).within(budget)
        check_transfers(graph, found.schedule)
        assert found.peak <= budget
        assert found.extra_seconds <= without.extra_seconds + 1e-9
    if seconds < 1:  # all copies hide
        assert search_of(problem).within(4 * MB).extra_seconds == 0
        assert search_of(alone).within(4 * MB).extra_seconds > 0


def test_the_least_memory_is_never_above_that_without_transfers() -> None:
    graph = there_and_back(12)
    search = search_of(Problem(graph, host_bandwidth=4.0 * MB))
    assert isinstance(search, OffloadSearch)
    assert search.minimum_memory.peak <= search.recomputing.minimum_memory.peak
    assert search.is_one_pass(search.minimum_memory)
    assert search.minimum_at_any_cost.peak <= search.minimum_memory.peak
    peaks = [(one.peak, one.extra_seconds) for one in search.frontier]
    assert peaks == sorted(peaks)
    assert any(one.schedule.transfers for one in search.frontier)


def test_small_values_stay() -> None:
    assert Stays(Problem(there_and_back(6, stays.SMALLEST_COPY)).plain).every
    assert not Stays(Problem(there_and_back(6, stays.SMALLEST_COPY - 1)).plain).every


# What is emitted


def random_transfers(step: Prepared, seed: int) -> Any:
    """A schedule of a step with random values on the host, from one that recomputes and from one that does not."""
    search = search_of(step.problem)
    start = random.Random(seed).choice([search.recomputing.minimum_memory, step.problem.plain])
    every = Stays(start).every
    chosen = random.Random(seed).sample(every, min(len(every), 12))
    return search.with_transfers(start, chosen, start.peak) if chosen else start


# A few kinds; with all of `training_steps` the test takes ten minutes.
KINDS = ("mlp", "gan", "nnx", "vjp")


@pytest.mark.short
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in KINDS])
def test_values_that_go_to_the_host_are_the_same_when_they_come_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stays, "SMALLEST_COPY", 1024)
    case = smaller_case(name)
    args, kwargs = case.make_args(), case.make_kwargs()
    function = optimize(case.step, target=with_link(1e9), offload=True, verify=False)
    moved = []

    def check(inner: Any, args: tuple, kwargs: dict) -> None:
        step = inner.prepare(*args, **kwargs)
        solution = random_transfers(step, len(name))
        check_transfers(step.bridge.graph, solution.schedule)
        leaves = [*step.captured.traced.jaxpr.consts, *jax.tree.leaves((args, kwargs))]
        leaves = [leaf for leaf in leaves if hasattr(leaf, "dtype")][: len(step.captured.input_avals)]
        written = jax.make_jaxpr(lambda *leaves: step.emit(solution, leaves))(*leaves)
        expected = run_op_by_op(step.captured.traced.jaxpr, leaves, apply_in_numpy)
        assert list(map(bits, run_op_by_op(written, leaves, apply_in_numpy))) == list(map(bits, expected))
        moved.extend(solution.schedule.transfers)

    function.ask(check, args, kwargs)
    assert moved


def layers_step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
    """Residual layers with SGD."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for w in weights:
            y = y + jnp.tanh(y @ w) @ w.T
        return jnp.mean(y**2)

    return [w - 1e-3 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


LAYERS = ([jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 12, jax.ShapeDtypeStruct((4096, 512), jnp.float32))
FEWER_LAYERS = (LAYERS[0][:8], LAYERS[1])
ROWS = 4096 * 512 * 4  # bytes of one activation


@functools.cache
def of_layers(budget: float | None = None, offload: bool = True, bandwidth: float = 400e9) -> Any:
    step = jax.jit(layers_step, donate_argnums=0)
    return optimize(step, target=with_link(bandwidth, "h200"), budget=budget, offload=offload, split=False)


@pytest.mark.xdist_group("layers")
def test_the_compiler_moves_what_the_plan_says() -> None:
    """On a fast link, which hides many copies."""
    plan, alone = of_layers(0.4).plan(*LAYERS), of_layers(0.4, offload=False).plan(*LAYERS)
    assert plan.measured is not None
    assert plan.plain_measured is not None
    assert plan.measured.temp_bytes <= 0.4 * plan.plain_measured.temp_bytes
    assert plan.predicted.host_bytes >= 2 * ROWS
    assert plan.measured.host_temp_bytes == pytest.approx(plan.predicted.host_bytes, rel=0.02)
    assert plan.measured.temp_bytes == pytest.approx(plan.predicted.peak_bytes, rel=by_jax(0.1, 0.13))
    assert plan.predicted.extra_seconds < 0.8 * alone.predicted.extra_seconds


@pytest.mark.xdist_group("layers")
def test_what_goes_to_the_host_is_reported(tmp_path: Any) -> None:
    function = of_layers(0.4)
    text = str(function.explain(*LAYERS))
    waits = "waits" if function.plan(*LAYERS).predicted.stall_seconds else "hides them"
    assert f"go to the host's memory and come back; the work beside the copies {waits}" in " ".join(text.split())
    assert "the host's memory, compiled" in text
    measured = remat_opt.measure(function, *LAYERS)
    assert "temporary memory of the host" in str(measured)
    plan = function.plan(*LAYERS)
    (turn,) = plan.choice.boundaries
    names = {function.ask(name_of, LAYERS, {})(one.value) for one in plan.transfers if one.gone < turn}
    assert names
    assert names <= set(plan.saved)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def name_of(inner: Any, args: tuple, kwargs: dict) -> Any:
    return inner.prepare(*args, **kwargs)._every_name.get


@pytest.mark.xdist_group("layers")
def test_a_plan_with_transfers_is_used_and_a_damaged_one_refused() -> None:
    plan = of_layers(0.4).plan(*LAYERS)
    again = optimize(jax.jit(layers_step, donate_argnums=0), target="h200", plan=plan).plan(*LAYERS)
    assert again.transfers == plan.transfers
    document = json.loads(plan.to_json())
    document["transfers"][0]["back"] += 1
    with pytest.raises(PlanError, match="edited"):
        Plan.from_json(json.dumps(document))
    hostile = dataclasses.replace(plan, transfers=(dataclasses.replace(plan.transfers[0], gone=0),))
    with pytest.raises(PlanError, match="transfers"):
        optimize(jax.jit(layers_step, donate_argnums=0), target="h200", plan=hostile).plan(*LAYERS)


@pytest.mark.xdist_group("layers")
def test_where_the_compiler_moves_nothing_nothing_is_planned_to_move(monkeypatch: pytest.MonkeyPatch) -> None:
    from remat_opt.callable import planned

    def without_host(*args: Any) -> Any:
        return dataclasses.replace(compile_candidate(*args), host_temp_bytes=0)

    compile_candidate = planned.compile_candidate
    monkeypatch.setattr(planned, "compile_candidate", without_host)
    step = jax.jit(layers_step, donate_argnums=0)
    plan = optimize(step, target=with_link(400e9, "h200"), budget=0.5, offload=True, split=False).plan(*FEWER_LAYERS)
    assert not plan.transfers
    assert "copies to the host are not made by the compiler" in plan.note


@pytest.mark.xdist_group("layers")
def test_the_least_memory_is_that_without_copies_where_the_compiler_needs_more_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from remat_opt.callable import planned

    def compiled(prepared: Any, solution: Any, options: Any) -> Any:
        """What is predicted, and four times as much with copies."""
        moves = solution is not None and bool(solution.schedule.transfers)
        temp = 4 * solution.peak if moves else 10**10 if solution is None else solution.peak
        return dataclasses.replace(figures, temp_bytes=temp, host_temp_bytes=int(moves))

    step = jax.jit(layers_step, donate_argnums=0)
    figures = remat_opt.measure(step, *FEWER_LAYERS, target="cpu").optimized
    monkeypatch.setattr(planned, "compile_candidate", compiled)
    alone, moved = (
        optimize(step, target=with_link(400e9, "h200"), budget="min", offload=offload, split=False).plan(*FEWER_LAYERS)
        for offload in (False, True)
    )
    assert not moved.transfers
    assert moved.measured is not None
    assert alone.measured is not None
    assert moved.measured.temp_bytes <= alone.measured.temp_bytes


@pytest.mark.short
def test_saved_values_are_awaited_in_a_forward_pass_with_transfers() -> None:
    """Value 1 is made of value 0 and saved; with copies in the program a compiler would make it late, and keep 0."""
    # A forward pass of four ops, of which only the last is on the way to the backward pass.
    ops = (
        Op((), (0,), seconds=1.0),
        Op((0,), (1,), seconds=1.0),
        Op((0,), (2,), seconds=1.0),
        Op((2,), (3,), seconds=1.0),
        Op((3,), (4,), seconds=1.0),
        Op((4, 1), (5,), seconds=1.0),
        Op((5, 2), (6,), seconds=1.0),
    )
    graph = Graph((MB,) * 7, ops, outputs=(6,), fused=True)
    order = tuple(range(7))
    with_copies = Schedule((Run(order),), (Transfer(4, 5, 2),))
    found = barriers(graph, with_copies, simulate(graph, with_copies))
    assert found[0, 3].results == (1,)
    assert not barriers(graph, Schedule((Run(order),)), simulate(graph, Schedule((Run(order),))))


def test_a_frontier_says_what_is_on_the_host() -> None:
    step, target = jax.jit(layers_step, donate_argnums=0), with_link(400e9, "h200")
    alone = remat_opt.frontier(step, *FEWER_LAYERS, target=target)
    both = remat_opt.frontier(step, *FEWER_LAYERS, target=target, offload=True)
    assert "on the host" in str(both)
    assert "on the host" not in str(alone)
    for point in alone:
        assert both.cheapest_within(point.peak_bytes).extra_seconds <= point.extra_seconds + 1e-9


# What users write


def test_targets_that_cannot_move_anything_are_refused() -> None:
    with pytest.raises(ValueError, match="host_bandwidth for offload=True, v5e has none"):
        optimize(layers_step, target="v5e", offload=True)
    with pytest.raises(ValueError, match="expected offload=True or offload=False"):
        optimize(layers_step, offload="yes")


def test_a_step_of_several_devices_is_refused() -> None:
    divided = NamedSharding(AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)]
    batch = jax.ShapeDtypeStruct((4096, 512), jnp.float32, sharding=divided)
    function = optimize(layers_step, target=with_link(1e10, "v5e:2x2"), offload=True, verify=False)
    with pytest.raises(ValueError, match="one device for offload=True"):
        function.plan(weights, batch)


def test_a_cpu_says_that_nothing_can_move_there() -> None:
    case = smaller_case("mlp")
    args = case.make_args()
    function = optimize(case.step, offload=True)
    with pytest.warns(RematWarning, match="nothing goes to the host: the memory of cpu is the host's"):
        results = function(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), results, case.step(*args))


def test_more_than_the_hosts_pool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "1")
    weights = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 8
    step = jax.jit(layers_step, donate_argnums=0)
    function = optimize(step, target=with_link(4e12, "h200"), budget=0.3, offload=True, verify=False, split=False)
    with pytest.raises(ValueError, match="Set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB="):
        function.plan(weights, jax.ShapeDtypeStruct((400_000, 512), jnp.float32))


def test_a_release_that_miscompiles_loops_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(p: jax.Array, x: jax.Array) -> jax.Array:
        return p - jax.grad(lambda p: jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p)[0]))(p)

    monkeypatch.setattr(jax.lib, "__version__", "0.11.0")
    with pytest.raises(ValueError, match=r"got jaxlib 0\.11\.0"):
        optimize(step, target="h200", offload=True, verify=False).plan(jnp.ones((4, 32, 32)), jnp.ones((8, 32)))
