"""Which of some ops depend on which, while some of them become one."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class Dependencies:
    """For each of some ops which of them have to run before it, as bits."""

    def __init__(self, ops: Iterable[tuple[Iterable[object], Iterable[object]]], candidates: Collection[int]):
        """
        Args:
            ops: what each reads and what it makes, in an order in which they can run.
            candidates: positions of the ops that are asked about.
        """
        self.place = {index: at for at, index in enumerate(sorted(candidates))}
        self.bits: list[int] = []
        known: dict[object, int] = {}  # by value
        for index, (read, made) in enumerate(ops):
            bits = 0
            for value in read:
                bits |= known.get(value, 0)
            at = self.place.get(index)
            if at is not None:
                self.bits.append(bits)
                bits |= 1 << at
            if bits:
                known.update(dict.fromkeys(made, bits))

    def are_apart(self, one: int, other: int) -> bool:
        """Whether neither depends on the other."""
        at, of_other = self.place[one], self.place[other]
        return not (self.bits[of_other] >> at & 1 or self.bits[at] >> of_other & 1)

    def needs(self, one: int, other: int) -> bool:
        """Whether one depends on the other."""
        return bool(self.bits[self.place[one]] >> self.place[other] & 1)

    def join(self, group: Collection[int]) -> None:
        """Who depends on one of a group depends on all, and on all that they depend on; ops before them, too, of which
        some are parts of later ones."""
        places = [self.place[index] for index in group]
        own, above = sum(1 << at for at in places), 0
        for at in places:
            above |= self.bits[at]
        self.bits = [bits | above | own if bits & own else bits for bits in self.bits]
        for at in places:
            self.bits[at] = above
