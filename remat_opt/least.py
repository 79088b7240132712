"""Which of the schedules of about the least peak the compiler is foreseen to need least for."""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.deciding import Decider
from remat_opt.forms import Found
from remat_opt.prepared import Prepared
from remat_opt.search import search_of

WORTH_WRITING = 0.98  # a peak above this part of the plain one, predicted or compiled, is no gain
MOST_FORESEEN = 8  # schedules of about the least peak
MOST_EQUATIONS_FORESEEN = 40_000  # of all of these together: some 25 seconds
ABOUT_AS_LITTLE = 1.005  # times the least that is foreseen


def least_foreseen(decider: Decider, found: Found) -> Found:
    """The schedule for which the compiler is foreseen to need least: that which was found, or another of `auto` with no
    more FLOPs and a peak not far above, or our order alone, where that spares memory worth the risk that the model errs
    there."""
    if decider.settings.solver != "auto" or not found.prepared.can_be_foreseen:
        return found
    longer, *near = (Found(found.prepared, solution) for solution in search_of(found.prepared.problem).near_least)
    found = min([found, *_cheaper([longer], found)], key=decider.foreseen)
    if not _is_foreseen_well(found.prepared):
        return found
    count = _most_foreseen(found.prepared)
    others = [found, *_cheaper([decider.forms.in_our_order], found), *_cheaper(near, found)[:count]]
    about_least = min(map(decider.foreseen, others)) * ABOUT_AS_LITTLE
    low = (one for one in others if decider.foreseen(one) <= about_least)
    least = min(low, key=lambda one: (one.extra_flops, decider.foreseen(one)))
    return least if decider.foreseen(least) <= WORTH_WRITING * decider.foreseen(found) else found


def our_order_alone(decider: Decider) -> list[Found]:
    """The step with nothing computed again, in our order: it costs nothing, and is asked before anything is refused,
    whatever is foreseen of it."""
    is_asked = decider.settings.solver == "auto" and _is_foreseen_well(decider.given)
    return [decider.forms.in_our_order] if is_asked else []


def near_least(decider: Decider, prepared: Prepared, seconds: float) -> list[Found]:
    """Schedules of about the least peak of one form of a step that take less extra time, the fastest first: peaks, by
    which is searched for a budget, and what the compiler needs do not rise together. None where foreseeing them takes
    long."""
    if decider.settings.solver != "auto" or not prepared.can_be_foreseen or not _is_foreseen_well(prepared):
        return []
    if _most_foreseen(prepared) < MOST_FORESEEN:
        return []
    near = (Found(prepared, solution) for solution in search_of(prepared.problem).near_least)
    faster = sorted((one for one in near if one.extra_seconds < seconds), key=lambda one: one.extra_seconds)
    return faster[:MOST_FORESEEN]


def _is_foreseen_well(prepared: Prepared) -> bool:
    """Of a TPU, and of what several devices have, too much is not in the model to choose among many by it."""
    return prepared.target.platform != "tpu" and not prepared.is_divided


def _most_foreseen(prepared: Prepared) -> int:
    """How many schedules of about the least peak are foreseen in a bearable time."""
    return min(MOST_FORESEEN, MOST_EQUATIONS_FORESEEN // max(len(prepared.captured.program.equations), 1))


def _cheaper(others: Sequence[Found], found: Found) -> list[Found]:
    """Those of other schedules that have no more FLOPs."""
    return [one for one in others if one.extra_flops <= found.extra_flops and not one.is_the_same_as(found)]
