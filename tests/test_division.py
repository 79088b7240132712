"""Which chunks a loop is divided into, against all divisions of short loops."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_opt.loops.division import MOST_UNITS, ChunkKind, LastChunk, divide, unit_of


def test_first_chunks_may_need_what_later_ones_are_done_with():
    """Six steps and 10 bytes: chunk k leaves 10 − k. Chunks of two steps need 8, one step at a time 1 for each step."""
    kinds = [ChunkKind(2, frozenset(), 8, 1.0), ChunkKind(1, frozenset(), 2, 3.0)]
    last = [LastChunk(frozenset(), 1, 4, 0.0, 0.0)]
    (found,) = divide(6, kinds, last, 1, [10], 2)
    assert [(chunks.number, chunks.steps) for chunks in found.earlier] == [(2, 2)]
    assert (found.last_steps, found.flops) == (2, 2.0)
    (less,) = divide(6, kinds, last, 1, [9], 2)
    assert [(chunks.number, chunks.steps) for chunks in less.earlier] == [(1, 2), (2, 1)]
    assert (less.last_steps, less.flops) == (2, 7.0)
    assert divide(6, kinds, last, 1, [2], 2) == [None]


def test_another_kind_has_to_save_what_it_costs():
    kinds = [ChunkKind(2, frozenset(), 8, 1.0), ChunkKind(1, frozenset(), 2, 3.0)]
    last = [LastChunk(frozenset(), 1, 4, 0.0, 0.0)]
    (cheap,) = divide(6, kinds, last, 1, [9], 2, group_flops=1.0)
    assert len(cheap.earlier) == 2
    (dear,) = divide(6, kinds, last, 1, [9], 2, group_flops=6.0)
    assert len(dear.earlier) == 1


def test_no_more_groups_than_asked_for():
    """A first chunk of a third kind would take one FLOP less."""
    kinds = [ChunkKind(2, frozenset({0}), 12, 4.0), ChunkKind(1, frozenset({1}), 4, 9.0)]
    kinds.append(ChunkKind(2, frozenset({2}), 14, 3.0))
    last = [LastChunk(frozenset(), 4, 2, 0.0, 5.0)]
    (two,), (three,) = (divide(13, kinds, last, 1, [15], most_groups) for most_groups in (2, 3))
    assert [(chunks.number, *chunks.in_chunk) for chunks in two.earlier] == [(3, 0), (4, 1)]
    assert [(chunks.number, *chunks.in_chunk) for chunks in three.earlier] == [(1, 2), (2, 0), (4, 1)]
    assert (two.flops, three.flops) == (58.0, 57.0)


@pytest.mark.parametrize("length", [MOST_UNITS, MOST_UNITS + 1, 4096])
def test_long_loops_are_divided_in_units(length):
    unit = unit_of(length)
    assert length / MOST_UNITS <= unit < length / MOST_UNITS + 1
    kinds = [ChunkKind(unit * 4, frozenset(), unit * 4, 1.0)]
    (found,) = divide(length, kinds, [LastChunk(frozenset(), 1, 1, 1.0, 1.0)], 1, [length], 1)
    assert sum(chunks.all_steps for chunks in found.earlier) + found.last_steps == length


def flops_of_best(length, kinds, last, first_bytes, limit, most_groups, group_flops):
    """By trying all."""
    best = math.inf

    def go_on(done, number, groups, latest, flops):
        nonlocal best
        rest = length - done
        for one in last:
            if number * first_bytes + one.bytes + (rest - 1) * one.more_bytes <= limit:
                best = min(best, flops + one.flops + (rest - 1) * one.more_flops)
        for kind in kinds:
            changes = groups + (latest is not kind)
            fits = (number + 1) * first_bytes + kind.bytes <= limit
            if done + kind.steps < length and fits and changes <= most_groups:
                more = kind.flops + (group_flops if latest is not kind else 0.0)
                go_on(done + kind.steps, number + 1, changes, kind, flops + more)

    go_on(0, 0, 0, None, 0.0)
    return best


counts = st.integers(0, 9)


@given(st.data())
def test_no_division_takes_fewer_flops(data):
    draw = data.draw
    length, first_bytes, most_groups = draw(st.integers(2, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kinds = [
        ChunkKind(draw(st.integers(1, 4)), frozenset({number}), draw(st.integers(1, 20)), float(draw(counts)))
        for number in range(draw(st.integers(0, 4)))
    ]
    last = [
        LastChunk(frozenset({-number}), *(draw(st.integers(1, 9)) for _ in "ab"), *(float(draw(counts)) for _ in "ab"))
        for number in range(1, draw(st.integers(2, 3)))
    ]
    limits, group_flops = draw(st.lists(st.integers(3, 40), min_size=1, max_size=3)), draw(st.sampled_from((0.0, 0.5)))
    for limit, found in zip(
        limits, divide(length, kinds, last, first_bytes, limits, most_groups, group_flops), strict=True
    ):
        best = flops_of_best(length, kinds, last, first_bytes, limit, most_groups, group_flops)
        if found is None:
            assert math.isinf(best)
            continue
        assert found.flops == pytest.approx(best)
        check(found, length, kinds, last, first_bytes, limit, most_groups, group_flops)


def check(found, length, kinds, last, first_bytes, limit, most_groups, group_flops):
    """A division has all steps, fits, and takes the FLOPs that it says."""
    number = 0
    flops = group_flops * len(found.earlier)
    assert len(found.earlier) <= most_groups
    for chunks in found.earlier:
        (kind,) = (kind for kind in kinds if kind.in_chunk == chunks.in_chunk)
        number += chunks.number
        flops += chunks.number * kind.flops
        assert kind.steps == chunks.steps
        assert number * first_bytes + kind.bytes <= limit
    assert sum(chunks.all_steps for chunks in found.earlier) + found.last_steps == length
    (one,) = (one for one in last if one.in_chunk == found.in_last)
    more = found.last_steps - 1
    assert number * first_bytes + one.bytes + more * one.more_bytes <= limit
    assert found.flops == pytest.approx(flops + one.flops + more * one.more_flops)
