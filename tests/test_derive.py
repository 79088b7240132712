"""From a choice to a schedule: what is kept, what is recomputed and when; and updates as early as they can be."""

import random

import pytest
from hypothesis import given
from random_graphs import Sketch, graphs_with_choices, random_choice, training_chain, training_graph, training_graphs

from remat_opt.graph.derive import Choice, derive, early_order
from remat_opt.graph.fusion import fuse
from remat_opt.graph.graph import Graph, Kind
from remat_opt.graph.liveness import simulate
from remat_opt.graph.schedule import Run, Schedule, save_everything


def schedule_of(graph: Graph, choice: Choice) -> Schedule:
    return derive(graph, choice, range(len(graph.ops)))


def recompute(*ops: int) -> Run:
    return Run(ops, recomputed=True)


# The chain of four: forward ops 0–3 make values 1–4, loss op 4 makes 5, backward ops 5–8 read (4, 3), …, (1, 0).
CHAIN = training_chain([1, 1, 1, 1])


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(cuts=(1, 2, 3)),  # cuts alone forget nothing
        Choice(saved=frozenset({2}), cuts=(2,)),
        Choice(boundaries=(0,)),  # nothing was made yet
        Choice(boundaries=(9,)),  # nothing comes behind
        Choice(saved=frozenset(range(1, 10)), boundaries=(3, 5), cuts=(1, 2)),
    ],
)
def test_where_nothing_is_evicted_the_step_is_as_it_was(choice: Choice) -> None:
    assert schedule_of(CHAIN, choice) == save_everything(CHAIN)


@given(graphs_with_choices())
def test_saving_every_value_is_the_identity(drawn: tuple[Graph, Choice]) -> None:
    graph, choice = drawn
    everything = Choice(frozenset(range(len(graph.sizes))), choice.boundaries, choice.cuts)
    assert schedule_of(graph, everything) == save_everything(graph)


def test_two_segments_are_recomputed_last_first_from_what_is_saved_between() -> None:
    choice = Choice(frozenset({2, 5}), boundaries=(5,), cuts=(2,))
    assert schedule_of(CHAIN, choice).runs == (
        Run((0, 1, 2, 3, 4)),
        recompute(2, 3),  # op 5 reads values 4 and 3; value 2 is saved
        Run((5, 6)),  # op 6 reads values 3 and 2
        recompute(0),  # op 7 reads values 2 and 1: op 1 makes the saved one, and runs once
        Run((7, 8)),
    )


def test_what_a_segment_needs_of_another_is_made_with_it_but_not_held_for_the_other() -> None:
    # Nothing is saved at the cut: for op 2 again, ops 0 and 1 run again, too, and once more when their own turn comes.
    choice = Choice(frozenset({5}), boundaries=(5,), cuts=(2,))
    assert schedule_of(CHAIN, choice).runs == (
        Run((0, 1, 2, 3, 4)),
        recompute(0, 1, 2, 3),
        Run((5,)),
        recompute(0, 1),
        Run((6, 7, 8)),
    )


def test_each_boundary_evicts_again() -> None:
    choice = Choice(frozenset({5, 6, 7}), boundaries=(5, 7))
    assert schedule_of(CHAIN, choice).runs == (
        Run((0, 1, 2, 3, 4)),
        recompute(0, 1, 2, 3),
        Run((5, 6)),
        recompute(0, 1),  # recomputed behind the first forward/backward boundary, evicted at the second
        Run((7, 8)),
    )


def test_what_was_recomputed_is_held_beyond_the_repeats_of_other_segments() -> None:
    sketch = Sketch()
    a, b = sketch.op(size=1), sketch.op(size=1)
    c = sketch.op(a, b, size=1)
    d = sketch.op(c, b, size=1)
    e = sketch.op(d, a, size=1)
    graph = sketch.graph(sketch.op(e, b, size=1))
    choice = Choice(frozenset({c}), boundaries=(3,), cuts=(1,))
    assert schedule_of(graph, choice).runs == (Run((0, 1, 2)), recompute(1), Run((3,)), recompute(0), Run((4, 5)))


def test_a_repeat_reads_what_another_repeat_has_left() -> None:
    sketch = Sketch()
    a = sketch.op(size=1)
    b = sketch.op(a, size=1)
    c = sketch.op(b, size=1)
    d = sketch.op(c, a, size=1)
    graph = sketch.graph(sketch.op(d, b, size=1))
    choice = Choice(frozenset({c}), boundaries=(3,), cuts=(1,))
    assert schedule_of(graph, choice).runs == (Run((0, 1, 2)), recompute(0), Run((3,)), recompute(1), Run((4,)))


def moments(graph: Graph, choice: Choice, order: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """Each op that runs with its epoch (how many forward/backward boundaries have passed) and whether it is a repeat.

    A repeat belongs to the epoch of the first run behind it.
    """
    points = sorted(set(choice.boundaries))
    found: list[tuple[int, int, bool]] = []
    position = 0
    for run in derive(graph, choice, order).runs:
        for op in run.ops:
            found.append((op, sum(point <= position for point in points), run.recomputed))
            position += not run.recomputed
    return found


@given(graphs_with_choices())
def test_a_schedule_keeps_the_order_and_repeats_what_it_may_where_it_is_needed(drawn: tuple[Graph, Choice]) -> None:
    graph, choice = drawn
    order = early_order(graph)
    schedule = derive(graph, choice, order)
    assert tuple(op for run in schedule.runs if not run.recomputed for op in run.ops) == order
    made = set(graph.inputs)
    for op in schedule.order:
        assert made.issuperset(graph.ops[op].inputs), "expected reads of what was made before"
        made.update(graph.ops[op].outputs)
    assert all(graph.ops[op].repeatable for op in schedule.recomputed)
    for run, following in zip(schedule.runs, (*schedule.runs[1:], None), strict=True):
        assert run.ops
        if run.recomputed:  # later is impossible, and earlier would hold it for longer: the next op reads it
            assert following is not None
            assert not following.recomputed
            recomputed = {value for op in run.ops for value in graph.ops[op].outputs}
            assert recomputed.intersection(graph.ops[following.ops[0]].inputs)


@given(graphs_with_choices())
def test_what_is_not_saved_is_never_read_across_a_boundary(drawn: tuple[Graph, Choice]) -> None:
    graph, choice = drawn
    kept = {*graph.inputs, *choice.saved, *(v for op in graph.ops if not op.repeatable for v in op.outputs)}
    kept.update(graph.outputs)  # there in any case
    epoch_of: dict[int, int] = {}
    for op, epoch, _ in moments(graph, choice, early_order(graph)):
        for value in graph.ops[op].inputs:
            assert value in kept or epoch_of[value] == epoch
        epoch_of.update(dict.fromkeys(graph.ops[op].outputs, epoch))


@given(graphs_with_choices())
def test_a_repeat_makes_something_that_is_read_and_was_evicted(drawn: tuple[Graph, Choice]) -> None:
    graph, choice = drawn
    trace = moments(graph, choice, early_order(graph))
    first_made: dict[int, int] = {}  # epoch
    for at, (op, epoch, repeat) in enumerate(trace):
        if repeat:
            assert first_made[op] < epoch, f"op {op} repeats what was not forgotten"
            wanted = [v for v in graph.ops[op].outputs if v not in choice.saved and v not in graph.outputs]
            assert any(is_read_before_made_again(graph, trace, v, at) for v in wanted), f"nobody wants op {op} again"
        else:
            first_made[op] = epoch


def is_read_before_made_again(graph: Graph, trace: list[tuple[int, int, bool]], value: int, at: int) -> bool:
    for op, _, _ in trace[at + 1 :]:
        if value in graph.ops[op].inputs:
            return True
        if value in graph.ops[op].outputs:
            return False
    return False


def test_random_choices_do_recompute() -> None:
    # The laws above say nothing of schedules without a repeat.
    sources = [random.Random(seed) for seed in range(100)]
    graphs = [training_graph(source, 6) for source in sources]
    repeats = [
        len(derive(graph, random_choice(source, graph), early_order(graph)).recomputed)
        for source, graph in zip(sources, graphs, strict=True)
    ]
    assert sum(count > 0 for count in repeats) > 40
    assert max(repeats) > 10


# Updates as early as they can be


def backward(sketch: Sketch, weights: list[int]) -> list[int]:
    """A forward op and a backward op for each weight (in reverse), with a loss between; their gradients."""
    value = sketch.op(size=10)
    values = [value]
    for weight in weights:
        values.append(sketch.op(values[-1], weight, size=10))
    cotangent = sketch.op(values[-1], size=10, kind=Kind.REDUCTION)
    gradients = []
    for index in range(len(weights) - 1, -1, -1):
        size = sketch.sizes[weights[index]]
        cotangent, gradient = sketch.ops_of(cotangent, values[index], weights[index], sizes=(10, size))
        gradients.insert(0, gradient)
    return gradients


def names_in_order(graph: Graph, names: dict[int, str]) -> list[str]:
    """Names of values, in the order in which `early_order` makes them; other ops by a dot."""
    return [names.get(graph.ops[op].outputs[0], ".") for op in early_order(graph)]


def test_sgd_with_momentum_updates_each_weight_right_after_its_gradient() -> None:
    sketch = Sketch()
    weights = [sketch.input(40), sketch.input(40)]
    moments = [sketch.input(40), sketch.input(40)]
    gradients = backward(sketch, weights)
    names = {}
    # As optax writes it: all decays, all moments, all weights.
    decayed = [sketch.elementwise(moment, size=40) for moment in moments]
    traces = [sketch.elementwise(gradient, d, size=40) for gradient, d in zip(gradients, decayed, strict=True)]
    news = [sketch.elementwise(weight, trace, size=40) for weight, trace in zip(weights, traces, strict=True)]
    for index in (0, 1):
        names |= {decayed[index]: f"decay{index}", traces[index]: f"moment{index}", news[index]: f"weight{index}"}
    donated = dict(zip([*weights, *moments], [*news, *traces], strict=True))
    graph = sketch.graph(*news, *traces, donated=donated)
    # Start, two layers, the loss, the backward of layer 1 …
    after_1 = ["decay1", "moment1", "weight1"]
    assert names_in_order(graph, names) == [*"....", ".", *after_1, ".", "decay0", "moment0", "weight0"]
    kernels = fuse(graph).graph
    early = simulate(kernels, derive(kernels, Choice(), early_order(kernels)))
    assert early.peak < simulate(kernels, save_everything(kernels)).peak


def test_the_scalars_that_adams_updates_share_stand_before_the_first_of_them() -> None:
    sketch = Sketch()
    count = sketch.input(1)
    weights = [sketch.input(4), sketch.input(4)]
    means = [sketch.input(4), sketch.input(4)]
    gradients = backward(sketch, weights)
    new_count = sketch.elementwise(count, size=1)
    correction = sketch.elementwise(new_count, size=1)
    decayed = [sketch.elementwise(mean, size=4) for mean in means]
    new_means = [sketch.elementwise(d, gradient, size=4) for d, gradient in zip(decayed, gradients, strict=True)]
    unbiased = [sketch.elementwise(mean, correction, size=4) for mean in new_means]
    news = [sketch.elementwise(weight, step, size=4) for weight, step in zip(weights, unbiased, strict=True)]
    donated = dict(zip([count, *weights, *means], [new_count, *news, *new_means], strict=True))
    graph = sketch.graph(new_count, *news, *new_means, donated=donated)
    names = {new_count: "count", correction: "correction"}
    for index in (0, 1):
        names |= {decayed[index]: f"decay{index}", new_means[index]: f"mean{index}"}
        names |= {unbiased[index]: f"step{index}", news[index]: f"weight{index}"}
    order = names_in_order(graph, names)
    # The count depends on no gradient and may stand anywhere before the correction.
    order.remove("count")
    group = ["decay{}", "mean{}", "step{}", "weight{}"]
    first, second = ([name.format(index) for name in group] for index in (1, 0))
    assert order in (
        [*".....", "correction", *first, ".", *second],
        [*".....", "decay1", "mean1", "correction", "step1", "weight1", ".", *second],
    )


def clipped_steps() -> tuple[Graph, int]:
    """SGD under a global-norm clip, with the norm's op."""
    sketch = Sketch()
    weights = [sketch.input(4), sketch.input(4)]
    gradients = backward(sketch, weights)
    squares = [sketch.op(gradient, size=1, kind=Kind.REDUCTION) for gradient in gradients]
    norm = sketch.elementwise(*squares, size=1)
    clipped = [sketch.elementwise(gradient, norm, size=4) for gradient in gradients]
    news = [sketch.elementwise(weight, gradient, size=4) for weight, gradient in zip(weights, clipped, strict=True)]
    graph = sketch.graph(*news, donated=dict(zip(weights, news, strict=True)))
    return graph, graph.producer[squares[-1]]


def test_under_a_global_norm_clip_no_update_runs_before_the_last_gradient_is_squared() -> None:
    graph, last_square = clipped_steps()
    order = early_order(graph)
    assert order[: last_square + 1] == tuple(range(last_square + 1))


def test_an_update_waits_for_the_last_reader_of_what_it_overwrites() -> None:
    sketch = Sketch()
    tied = sketch.input(4)
    gradient = sketch.op(size=4)
    reader = sketch.op(tied, size=1)
    later = sketch.op(reader, size=1)
    new = sketch.elementwise(tied, gradient, size=4)
    donated = sketch.graph(new, later, donated={tied: new})
    kept = sketch.graph(new, later)
    assert early_order(donated) == (0, 1, 3, 2)
    assert early_order(kept) == (0, 3, 1, 2)  # nothing to overwrite, nothing to wait for


def test_an_update_with_random_numbers_or_effects_stays_where_it_is() -> None:
    sketch = Sketch()
    weight = sketch.input(4)
    gradient = sketch.op(size=4)
    later = sketch.op(size=1)
    noisy = sketch.op(weight, gradient, size=4, kind=Kind.ELEMENTWISE, repeatable=False)
    assert early_order(sketch.graph(noisy, later)) == (0, 1, 2)


@given(training_graphs())
def test_the_early_order_is_topological(graph: Graph) -> None:
    order = early_order(graph)
    assert sorted(order) == list(range(len(graph.ops)))
    made = set(graph.inputs)
    for op in order:
        assert made.issuperset(graph.ops[op].inputs)
        made.update(graph.ops[op].outputs)


@given(training_graphs())
def test_all_but_elementwise_work_on_results_keeps_its_order(graph: Graph) -> None:
    def leads_to_outputs_only(op: int) -> bool:
        users = [user for value in graph.ops[op].outputs for user in graph.users[value]]
        return graph.ops[op].kind is Kind.ELEMENTWISE and all(map(leads_to_outputs_only, users))

    kept = [op for op in early_order(graph) if not leads_to_outputs_only(op)]
    assert kept == sorted(kept)
