"""Choose what is done to each pair of scans.

Least memory: for each pair, take the option with the fewest bytes that costs at most one extra forward pass
(`MOST_EXTRA` of the program's FLOPs, divided among the pairs). Two levels need a second extra forward pass. It is
allowed in recurrent networks if it saves at least the share `SECOND_PASS_THRESHOLD` of the bytes: their loops are as
long as sequences, and the time of a step is that of reading its weights. In a loop over layers it would be the whole
forward pass of the network; only a budget may ask for it.

Under a budget: take the options with the least extra time that fit. They are found by replacing one option at a time by
a smaller one, the replacement with the fewest seconds per byte first. Equal pairs share their options, which are
searched once, and are replaced at the same time; the last replacement takes only as many of them as the budget needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

from remat_opt.graph.cost import Rates
from remat_opt.loops.choice import LoopChoice
from remat_opt.loops.costs import Option
from remat_opt.loops.equal import pair_key
from remat_opt.loops.options import PairOptions, pair_options
from remat_opt.loops.pairs import Pair, Pairs, find_pairs
from remat_opt.loops.steps import StepSearch
from remat_opt.loops.update import find_update
from remat_opt.trace.avals import bytes_of
from remat_opt.trace.flops import flops_of
from remat_opt.trace.inline import Program

MOST_EXTRA = 0.35
MOST_EXTRA_TWICE = 0.70
SECOND_PASS_THRESHOLD = 0.15
GAIN_THRESHOLD = 0.98  # an option with more than this part of the original bytes is no gain


@dataclasses.dataclass(frozen=True)
class WrittenPair:
    """What is done to one pair, for reports.

    Attributes:
        length: steps of the loop.
        choice: how it is written.
        given_bytes: what it needs as it was given; None where that was not worked out.
        bytes: what it needs as it is written.
    """

    length: int
    choice: LoopChoice
    given_bytes: int | None
    bytes: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class LoopChoices:
    """What is done to the loops of a program.

    Attributes:
        pairs: all pairs of the program.
        chosen: for pairs that are rewritten, by their position, what is done to them.
        options: of all pairs; none where it is a user's plan that says what is chosen.
        left: for each loop that has to stay as it is, the reason.
        inside: None where bodies of loops are as they were, else the share of memory that they were rewritten for.
        bodies: how many bodies of loops were rewritten, with their own pairs and segments.
    """

    pairs: tuple[Pair, ...]
    chosen: tuple[tuple[int, LoopChoice], ...]
    options: tuple[PairOptions, ...]
    left: tuple[str, ...]
    inside: float | None = None
    bodies: int = 0

    def summary(self, *, written: bool) -> str:
        """A sentence on what was done to the loops, empty where there are none."""
        said = []
        if written and self.chosen:
            said.append(f"{len(self.chosen)} of {len(self.pairs)} pairs of loops written again")
        if written and self.bodies:
            said.append(f"{self.bodies} bodies of loops written again")
        for reason in dict.fromkeys(self.left):
            said.append(f"{self.left.count(reason)} left as it is: {reason}")
        return ", ".join(said)

    @property
    def written(self) -> tuple[WrittenPair, ...]:
        """The pairs that are rewritten."""
        found = []
        for at, choice in self.chosen:
            options = self.options[at].options if self.options else ()
            sizes = {option.choice: option.bytes for option in options}
            found.append(WrittenPair(self.pairs[at].length, choice, sizes.get(None), sizes.get(choice)))
        return tuple(found)

    @property
    def host_bytes(self) -> int:
        """Of the stacks that are in the host's memory."""
        return sum(
            self.pairs[at].length * sum(bytes_of(self.pairs[at].forward.body.avals[value]) for value in choice.host)
            for at, choice in self.chosen
        )

    @property
    def stall_seconds(self) -> float:
        """How long the loops wait for copies to the host's memory and back; 0 where that was not worked out."""
        if not self.options:
            return 0.0
        known = ({one.choice: one.stall_seconds for one in self.options[at].options} for at, _ in self.chosen)
        return sum(of[choice] for of, (_, choice) in zip(known, self.chosen, strict=True))

    @property
    def most_extra(self) -> float:
        """The most extra FLOPs, as a part of the step's, for much less memory."""
        if not self.chosen or not self.options:
            return MOST_EXTRA
        recurrent = any(self.options[at].is_recurrent for at, _ in self.chosen)
        return MOST_EXTRA_TWICE if recurrent else MOST_EXTRA


def choose(
    program: Program, rates: Rates, aliases: Sequence[tuple[int, int]] = (), *, keep_checkpoints: bool = False
) -> LoopChoices:
    """Choose the least memory for all pairs of a program; arguments as of `ways_to_write`."""
    pairs, options, share = _options_of(program, rates, aliases, keep_checkpoints)
    picked = []
    for once, twice in (_once_and_twice(pair, share) for pair in options):
        picked.append(twice if twice.bytes <= (1 - SECOND_PASS_THRESHOLD) * once.bytes else once)
    return _choices_of(pairs, options, picked)


class Ways:
    """Choices for all pairs of a program.

    Args:
        pairs: the pairs.
        options: of each of them.
        share: the program's FLOPs as a multiple of the pairs'.

    Attributes:
        given: the pairs as they are.
        least: `given`, and the least memory with one and with two extra forward passes, where these differ.
    """

    def __init__(self, pairs: Pairs, options: tuple[PairOptions, ...], share: float):
        self.pairs = pairs
        self.options = options
        self.original = [pair.options[0] for pair in options]
        self.known: dict[tuple, LoopChoices] = {}
        both = [_once_and_twice(pair, share) for pair in options]
        self.given = self._known(self.original)
        self.least = tuple(
            dict.fromkeys((self.given, *(self._known([picked[most] for picked in both]) for most in (0, 1))))
        )

    def between(self, share: float) -> LoopChoices:
        """The least time for a number of bytes between the least, share 0, and those of the pairs as they are."""
        least, plain = max(needed(within_budget(self.options, 0)), 1), max(needed(self.original), 1)
        return self._known(within_budget(self.options, int(least * (plain / least) ** share)))

    def _known(self, picked: Sequence[Option]) -> LoopChoices:
        choices = _choices_of(self.pairs, self.options, picked)
        return self.known.setdefault(choices.chosen, choices)


def ways_to_write(
    program: Program,
    rates: Rates,
    aliases: Sequence[tuple[int, int]] = (),
    *,
    keep_checkpoints: bool = False,
    steps: StepSearch | None = None,
) -> Ways:
    """Choices for all pairs of a program.

    Args:
        program: the flat step.
        rates: the target.
        aliases: (input, output) pairs of the program that share one buffer.
        keep_checkpoints: do not look into the user's own `jax.checkpoint` regions.
        steps: searches schedules of a step of a reverse loop.
    """
    return Ways(*_options_of(program, rates, aliases, keep_checkpoints, steps))


def _options_of(
    program: Program,
    rates: Rates,
    aliases: Sequence[tuple[int, int]],
    keep_checkpoints: bool,
    steps: StepSearch | None = None,
) -> tuple[Pairs, tuple[PairOptions, ...], float]:
    """The pairs with their options, and the program's FLOPs as a multiple of the pairs'."""
    pairs = find_pairs(program, keep_checkpoints=keep_checkpoints)
    of_equal: dict[Hashable, PairOptions] = {}
    options = []
    for pair in pairs.pairs:
        update = find_update(program, pair, aliases, pairs.pairs)
        key = pair_key(program, pair, update)
        if key not in of_equal:
            of_equal[key] = pair_options(program, pair, rates, update, steps)
        options.append(of_equal[key])
    flops = sum(flops_of(equation, program) for equation in program.equations)
    return pairs, tuple(options), flops / (sum(one.flops for one in options) or 1.0)


def _choices_of(pairs: Pairs, options: tuple[PairOptions, ...], picked: Sequence[Option]) -> LoopChoices:
    chosen = tuple((at, option.choice) for at, option in enumerate(picked) if option.choice is not None)
    return LoopChoices(pairs.pairs, chosen, options, pairs.left)


def _once_and_twice(pair: PairOptions, share: float) -> tuple[Option, Option]:
    """The fewest bytes with one extra forward pass, and with two, of a program with `share` times the pair's FLOPs."""
    original = pair.options[0]
    found = []
    for most in (MOST_EXTRA, MOST_EXTRA_TWICE if pair.is_recurrent else MOST_EXTRA):
        allowed = (option for option in pair.options if pair.is_allowed(option, most * share))
        best = min(allowed, key=lambda option: (option.bytes, option.extra_flops))
        found.append(best if best.bytes <= GAIN_THRESHOLD * original.bytes else original)
    return found[0], found[1]


def within_budget(pairs: Sequence[PairOptions], budget: int) -> list[Option]:
    """One option for each pair, which need at most `budget` bytes in all, or the least that was found."""
    picked = [pair.options[0] for pair in pairs]
    equal: dict[int, list[int]] = {}
    for at, pair in enumerate(pairs):
        equal.setdefault(id(pair), []).append(at)
    while needed(picked) > budget:
        steps = []
        for group in equal.values():
            pair, before = pairs[group[0]], picked[group[0]]
            for option in pair.options:
                gain = before.bytes - option.bytes
                if gain > 0 and pair.is_allowed(option, MOST_EXTRA_TWICE):
                    enough = needed(_exchanged(picked, group, option)) <= budget
                    more = max(option.extra_seconds - before.extra_seconds, 0.0)
                    # What is enough by itself is judged by its time alone, what is not by time for each byte.
                    steps.append((not enough, more if enough else more / gain, -gain, group, option))
        if not steps:
            break
        _, _, _, group, option = min(steps, key=lambda step: step[:4])
        every = (_exchanged(picked, group[:count], option) for count in range(1, len(group) + 1))
        picked = next((one for one in every if needed(one) <= budget), _exchanged(picked, group, option))
    return picked


def _exchanged(picked: Sequence[Option], which: Sequence[int], option: Option) -> list[Option]:
    return [option if at in which else before for at, before in enumerate(picked)]


def needed(picked: Sequence[Option]) -> int:
    """Bytes that loops need in all: what they save, and the most that one of them needs while it runs."""
    return sum(option.kept_bytes for option in picked) + max((option.transient_bytes for option in picked), default=0)
