"""Choose what is done to each pair of scans.

Least memory: for each pair the option with the fewest bytes among those that cost at most one extra forward pass,
`MOST_EXTRA` of the program's FLOPs, of which each pair has its part. A second extra forward pass, as two levels need,
is paid where it takes a good part of the bytes away, `WORTH_A_SECOND`: so it is for most recurrent networks and for
very deep ones.

Under a budget: the options with the least extra time that fit, found by exchanging one pair's option at a time for a
smaller one, that with the fewest seconds for each byte first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from remat_opt.graph.build import flops_of
from remat_opt.graph.cost import Rates
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.options import Option, PairOptions, pair_options
from remat_opt.loops.pairs import Pair, find_pairs
from remat_opt.program.inline import Program

MOST_EXTRA = 0.35
MOST_EXTRA_TWICE = 0.70
WORTH_A_SECOND = 1 / 3
WORTH_WRITING = 0.98  # an option with more than this part of the bytes as given is no gain


@dataclasses.dataclass(frozen=True, eq=False)
class LoopChoices:
    """What is done to the loops of a program.

    Attributes:
        pairs: all pairs of the program.
        chosen: for pairs that are written again, by their position, what is done to them.
        options: the pairs with all their options.
        left: for each loop that has to stay as it is, the reason.
        inside: how many bodies of loops were written again, with their own pairs and segments.
    """

    pairs: tuple[Pair, ...]
    chosen: tuple[tuple[int, LoopChoice], ...]
    options: tuple[PairOptions, ...]
    left: tuple[str, ...]
    inside: int = 0

    def summary(self, *, written: bool) -> str:
        """A sentence on what was done to the loops, empty where there are none."""
        said = []
        if written and self.chosen:
            said.append(f"{len(self.chosen)} of {len(self.pairs)} pairs of loops written again")
        if written and self.inside:
            said.append(f"{self.inside} bodies of loops written again")
        for reason in dict.fromkeys(self.left):
            said.append(f"{self.left.count(reason)} left as it is: {reason}")
        return ", ".join(said)

    @property
    def extra_flops(self) -> float:
        """FLOPs beyond those of the loops as they are."""
        return sum(self._picked(at, choice).extra_flops for at, choice in self.chosen)

    @property
    def extra_seconds(self) -> float:
        """Estimated seconds beyond those of the loops as they are."""
        return sum(self._picked(at, choice).extra_seconds for at, choice in self.chosen)

    def _picked(self, at: int, choice: LoopChoice) -> Option:
        return next(option for option in self.options[at].options if option.choice == choice)


def choose(
    program: Program,
    rates: Rates,
    aliases: Sequence[tuple[int, int]] = (),
    budget: int | None = None,
    *,
    keep_checkpoints: bool = False,
) -> LoopChoices:
    """Choose for all pairs of a program.

    Args:
        program: the flat step.
        rates: the target.
        aliases: (input, output) pairs of the program that share one buffer.
        budget: bytes that the loops may need together; None for the least memory.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
    """
    found = find_pairs(program, keep_checkpoints=keep_checkpoints)
    options = tuple(pair_options(program, pair, rates, aliases, found.pairs) for pair in found.pairs)
    flops = sum(flops_of(equation, program) for equation in program.equations)
    share = flops / (sum(one.flops for one in options) or 1.0)
    picked = [least_bytes(one, share) for one in options] if budget is None else within_budget(options, budget)
    chosen = tuple((at, option.choice) for at, option in enumerate(picked) if option.choice is not None)
    return LoopChoices(found.pairs, chosen, options, found.left)


def least_bytes(pair: PairOptions, share: float = 1.0) -> Option:
    """The option with the fewest bytes at a bearable price.

    Args:
        pair: the options.
        share: FLOPs that the price is a part of, as a multiple of the pair's own.
    """
    given = pair.options[0]
    once, twice = (
        min((o for o in pair.options if o.extra_flops <= most * share * pair.flops), key=_order)
        for most in (MOST_EXTRA, MOST_EXTRA_TWICE)
    )
    best = twice if twice.bytes <= (1 - WORTH_A_SECOND) * once.bytes else once
    return best if best.bytes <= WORTH_WRITING * given.bytes else given


def within_budget(pairs: Sequence[PairOptions], budget: int) -> list[Option]:
    """One option for each pair that together need at most `budget` bytes, or the least that was found."""
    picked = [pair.options[0] for pair in pairs]
    while needed(picked) > budget:
        steps = []
        for at, pair in enumerate(pairs):
            for option in pair.options:
                gain = picked[at].bytes - option.bytes
                if gain > 0 and option.extra_flops <= MOST_EXTRA_TWICE * pair.flops:
                    enough = needed([*picked[:at], option, *picked[at + 1 :]]) <= budget
                    more = max(option.extra_seconds - picked[at].extra_seconds, 0.0)
                    # What is enough by itself is judged by its time alone, what is not by time for each byte.
                    steps.append((not enough, more if enough else more / gain, -gain, at, option))
        if not steps:
            break
        _, _, _, at, option = min(steps, key=lambda step: step[:4])
        picked[at] = option
    return picked


def needed(picked: Sequence[Option]) -> int:
    """Bytes that loops need together: all that they keep, and the most that one of them needs while it runs."""
    return sum(option.kept_bytes for option in picked) + max((option.transient_bytes for option in picked), default=0)


def _order(option: Option) -> tuple:
    return (option.bytes, option.extra_flops)
