"""How a TPU's compiler stores an image's features in groups, as group normalisation has them.

A reshape of (batch, space, features) into (batch, space, groups, features of each) is no kernel, as XLA does what is
done in groups on the image, up to a barrier or a loop. What these are given lies as its own shape pads least, with
space in the lanes instead of features, and is a copy. A loop's body makes an image of it again in each turn, and so
does what reads it behind a barrier; behind a loop the image is read that it was made of.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from jax.extend.core import primitives as P

from remat_opt.compilers.reader import Reader
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import padded_bytes
from remat_opt.program import compat
from remat_opt.program.images import stored_as
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE


def in_groups(program: Program, images: Set[int]) -> frozenset[int]:
    """What has an image's features in groups."""
    found: set[int] = set()
    for equation in program.equations:
        if equation.primitive is not P.reshape_p or not isinstance(equation.inputs[0], int):
            continue
        whole, parts = sorted((equation.inputs[0], equation.outputs[0]), key=lambda x: program.avals[x].ndim)
        if whole in images and _are_groups(program.avals[whole].shape, program.avals[parts].shape):
            found.add(parts)
    return stored_as(program)(found) if found else frozenset()


def _are_groups(image: Sequence[int], parts: Sequence[int]) -> bool:
    return len(parts) == len(image) + 1 and tuple(parts[:-2]) == tuple(image[:-1]) and min(parts[-2:]) > 1


def joined_features(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of an image whose features lie in groups."""
    return (*shape[:-2], shape[-2] * shape[-1])


class Groups:
    """What lies in groups of features, and its copies."""

    def __init__(self, reader: Reader, images: Set[int], loop: tuple[int, int] | None):
        """
        Args:
            reader: of the program.
            images: of the program.
            loop: if this is a loop's body, how many constants it is given first, and how much it carries behind these.
        """
        self.reader = reader
        self.found = in_groups(reader.program, images)
        self.given = self.found.intersection(reader.program.inputs[: loop[0]] if loop else ())
        self.apart: set[int] = set()  # what is read in groups, and not as an image
        self.copies: dict[int, int] = {}  # in groups, of what lies as an image
        self.lying_as_images = set(self.found.difference(reader.program.inputs))

    def copied_before(self, equation: Equation) -> list[Op]:
        """The copies that are made for an equation."""
        operands = self._of_groups(equation.inputs)
        if not operands:
            return []
        if equation.primitive is compat.barrier_p:
            ops = self._copy_to_groups(operands)
            self.reader.same.update((x, (self.copies[x],)) for x in operands if x in self.copies)
            self._set_apart(equation.outputs)
            return ops
        if equation.primitive is P.scan_p:
            constants, _ = compat.scan_counts(equation.params)
            return self._copy_to_groups(self._of_groups(equation.inputs[:constants]))
        if equation.primitive not in ELEMENTWISE:
            return []
        if not self.apart.isdisjoint(operands):
            self._set_apart(equation.outputs)
        return self._copy_to_images([x for x in operands if x in self.given and x not in self.reader.same])

    def read_by_loop(self, equation: Equation, inputs: Sequence[int]) -> tuple[int, ...]:
        """Buffers that a loop is given, copies in place of what they are made of."""
        copied = {self.reader.buffer(x): copy for x, copy in self.copies.items() if x in equation.inputs}
        return tuple(copied.get(value, value) for value in inputs)

    def _copy_to_groups(self, values: Sequence[int]) -> list[Op]:
        """Copies of what lies as an image, one of each in all of the program."""
        ops = []
        for x in values:
            if x not in self.apart and x not in self.reader.program.inputs and x not in self.copies:
                ops.append(self._copy(x, is_image=False))
                (self.copies[x],) = ops[-1].outputs
        return ops

    def _copy_to_images(self, values: Sequence[int]) -> list[Op]:
        """Copies of what a body is given in groups, which all that follows reads."""
        ops = [self._copy(x, is_image=True) for x in values]
        self.reader.same.update((x, op.outputs) for x, op in zip(values, ops, strict=True))
        return ops

    def _of_groups(self, atoms: Sequence[int | Constant]) -> list[int]:
        found = self.found.intersection(x for x in atoms if isinstance(x, int) and x not in self.reader.constants)
        return sorted(found)

    def _set_apart(self, values: Sequence[int]) -> None:
        self.apart |= self.found.intersection(values)
        self.lying_as_images -= self.apart

    def makes_image(self, equation: Equation) -> bool:
        """Whether an equation makes an image of what lies in groups apart from it."""
        return equation.primitive is P.reshape_p and equation.inputs[0] in self.apart

    def _copy(self, value: int, *, is_image: bool) -> Op:
        reader = self.reader
        aval = reader.program.avals[value]
        shape = joined_features(aval.shape) if is_image else aval.shape
        copy = reader.new(padded_bytes(shape, compat.item_bytes(aval.dtype), is_image=is_image))
        return Op(reader.behind([value]), (copy,), kind=Kind.OPAQUE if is_image else Kind.ELEMENTWISE, name="copy")
