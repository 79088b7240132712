"""How images lie between a TPU's convolutions in groups: as these read and make them, with the batch in the lanes, or
with a group's features.

XLA's layout assignment goes from a convolution along elementwise work, pooling, and what is cut or joined.

- Where it meets no other convolution, all images lie so, pooled ones too, and nothing is copied.
- Where it meets one by elementwise work alone, all lie as that has them, and convolutions in groups have copies
  (`tpu_convolutions.py`). So it is where it meets what a barrier returns: barriers hold images as such.
- Where another convolution lies behind a window or a joint, both meet. What convolutions in groups read and make, and
  elementwise work on it, is as in the first case. A copy as an image has what is read by anything else, by reductions
  of what is done on a convolution's result, and by work on a cotangent for the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from jax.extend.core import primitives as P

from remat_opt.compilers.equations import features_of_groups
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import LANES, bytes_with_features_or_batch_in_lanes
from remat_opt.program import compat
from remat_opt.program.images import connected_images, elementwise_images
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, REDUCTION

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader


def is_by_groups(equation: Equation, program: Program) -> bool:
    """Whether an equation is a convolution in groups of several features, which do not fill the lanes."""
    if equation.primitive is not P.conv_general_dilated_p:
        return False
    groups, features = features_of_groups(equation.params, [program.aval_of(x).shape for x in equation.inputs])
    return groups > 1 and 1 < max(features) < LANES


def images_by_groups(equation: Equation) -> Mapping[int, Sequence[int]]:
    """Images that a convolution in groups reads and makes, with which dimensions are their examples and features."""
    numbers = equation.params["dimension_numbers"]
    if equation.params["batch_group_count"] > 1:
        found = zip(equation.inputs, (numbers.lhs_spec, numbers.rhs_spec), strict=True)
        return {x: (spec[1], spec[0]) for x, spec in found if isinstance(x, int)}
    found = zip((equation.inputs[0], *equation.outputs), (numbers.lhs_spec, numbers.out_spec), strict=True)
    return {x: (spec[0], spec[1]) for x, spec in found if isinstance(x, int)}


def _bytes_of_image(shape: Sequence[int], item: int) -> int:
    return bytes_with_features_or_batch_in_lanes(shape, item, 0, len(shape) - 1)


def _has_several(equation: Equation, program: Program) -> bool:
    """Whether each group of a convolution has several features of all images."""
    groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
    images = images_by_groups(equation).items()
    return all(program.avals[image].shape[features] > groups for image, (_, features) in images)


class Grouped:
    """What lies as convolutions in groups have it, with the copies of that.

    Attributes:
        layouts: of each such image which dimensions are its examples and its features, and how many groups these are.
        mixed: those that meet images of other convolutions behind windows and joints.
        given: what a program is given and has copied to lie so, with an image that does.
    """

    def __init__(self, reader: TpuReader, images: frozenset[int]):
        """
        Args:
            reader: of the program.
            images: of the program, those that it is given among them.
        """
        self.reader = reader
        self.images = images
        self.layouts: dict[int, tuple[int, int, int]] = {}
        self.mixed: set[int] = set()
        self.given: dict[int, int] = {}
        program = reader.program
        convolutions = [one for one in program.equations if one.primitive is P.conv_general_dilated_p]
        self._by_groups = [one for one in convolutions if self._is_by_groups(one)]
        if self._by_groups:
            made = {value for one in self._by_groups for value in one.outputs}
            others = (one for one in convolutions if made.isdisjoint(one.outputs))
            held = (x for one in program.equations if one.primitive is compat.barrier_p for x in one.outputs)
            of_others = (x for one in others for x in (*one.inputs, *one.outputs))
            self._find(images.intersection([*held, *of_others, *reader.parts.cut]))
        self._computed = self._computed_as_images()
        self._steps = frozenset(value for steps in self._computed.values() for value in steps)

    def _find(self, of_others: Set[int]) -> None:
        """Where images lie so.

        Args:
            of_others: what other convolutions read and make, barriers return, and what is there in parts.
        """
        program = self.reader.program
        alike, connected = elementwise_images(program), connected_images(program)
        lying_otherwise, meeting_others = alike(of_others), connected(of_others)
        results = {value for one in self._by_groups for value in one.outputs}
        for equation in self._by_groups:
            groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
            for image, (examples, features) in images_by_groups(equation).items():
                if image in self.layouts or image in lying_otherwise:
                    continue
                meets_others = image in meeting_others
                rank = program.avals[image].ndim
                reached = (alike if meets_others else connected)([image])
                if reached.isdisjoint(results):
                    continue
                of_rank = [x for x in reached if program.avals[x].ndim == rank]
                found = {x for x in of_rank if program.avals[x].shape[features] % groups == 0}
                made = found.difference(program.inputs)
                self.layouts.update(dict.fromkeys(made, (examples, features, groups)))
                if meets_others:
                    self.mixed |= made
                elif made:
                    self.given.update(dict.fromkeys(found - made, min(made)))

    def _is_by_groups(self, equation: Equation) -> bool:
        return is_by_groups(equation, self.reader.program) and _has_several(equation, self.reader.program)

    def bytes_of(self, image: int, item: int, like: int = -1) -> int:
        """Bytes of an image that lies so.

        Args:
            image: the value.
            item: bytes of one element.
            like: an image that it lies like; itself, if none is said.
        """
        examples, features, groups = self.layouts[image if like < 0 else like]
        shape = self.reader.program.avals[image].shape
        in_group = shape[features] // groups
        others = self.reader.program.avals[image].size // (shape[examples] * in_group)
        return bytes_with_features_or_batch_in_lanes((others, shape[examples], in_group), item, 1, 2)

    @functools.cached_property
    def cotangents(self) -> frozenset[int]:
        """Of what lies so what gradients of weights read second, which lies as an image before."""
        gradients = (one for one in self._by_groups if one.params["batch_group_count"] > 1)
        return frozenset(self.layouts).intersection(
            x for x in (one.inputs[1] for one in gradients) if isinstance(x, int)
        )

    @functools.cached_property
    def _results(self) -> frozenset[int]:
        return frozenset(value for one in self._by_groups for value in one.outputs).intersection(self.mixed)

    @functools.cached_property
    def _done_beside(self) -> Mapping[int, Sequence[int]]:
        """What elementwise work makes of a convolution's result that it alone reads, up to what several read: by its
        end the steps before."""
        found: dict[int, Sequence[int]] = {}
        for value in self._results:
            steps: list[int] = []
            while len(readers := self.reader.readers.get(value, ())) == 1 and readers[0].primitive in ELEMENTWISE:
                (made,) = readers[0].outputs
                if made not in self.mixed or value in self.reader.program.outputs:
                    break
                value = made
                steps.append(value)
            if steps:
                found[steps[-1]] = steps[:-1]
        return found

    def _computed_as_images(self) -> Mapping[int, Sequence[int]]:
        """Of these what is read as images alone, and is computed so: it lies otherwise."""
        found = {end: steps for end, steps in self._done_beside.items() if not self._is_read_so(end)}
        for image in (value for end, steps in found.items() for value in (*steps, end)):
            self.mixed.discard(image)
            del self.layouts[image]
        return found

    def _is_read_so(self, image: int) -> bool:
        """Whether what lies so is computed of an image elementwise, or a convolution in groups reads it."""
        program = self.reader.program
        for reader in self.reader.readers.get(image, ()):
            made = [
                x for x in reader.outputs if x in self.mixed and program.avals[x].shape == program.avals[image].shape
            ]
            if made or self._is_by_groups(reader):
                return True
        return False

    def with_copies(self, equation: Equation, ops: Sequence[Op]) -> Sequence[Op]:
        """An equation's ops, but for convolutions in groups, with the copies of images that are made for them."""
        if not self.layouts or self._is_by_groups(equation):
            return ops
        if equation.primitive in REDUCTION and equation.inputs[0] in self.mixed:
            return self._done_on_images(equation, ops) if self._is_done_on_images(equation) else ops
        (result,) = equation.outputs if len(equation.outputs) == 1 else (-1,)
        if result in self._steps:
            return []  # done with the last of them
        if result in self._computed:
            return self._done_on_images(equation, ops)
        if result in self.layouts and equation.primitive in ELEMENTWISE:
            return self._read_by(ops, [x for x in self._images_of(equation) if x not in self.layouts], result)
        if result in self.mixed:
            return self._made_as_image(equation, ops, result)
        for x, like in self.given.items():
            ops = self._read_by(ops, [x], like) if x in equation.inputs else ops
        return self._read_by(ops, [x for x in self._images_of(equation) if x in self.mixed])

    def as_read(self, copies: list[Op], image: int) -> int | None:
        """The copy of an image that a convolution in groups reads, None for the image itself.

        Args:
            copies: to which what makes it is added.
            image: that lies so, or that the program is given.
        """
        if image in self.given:
            return self._copy(copies, image, self.given[image])
        return self._cotangent(copies, image) if image in self.cotangents else None

    def held_by(self, barrier: Equation, copies: list[Op]) -> Mapping[int, int]:
        """What a barrier is given that lies so, with copies as images."""
        return {x: self._copy(copies, x) for x in self.reader.variables(barrier) if x in self.layouts}

    def _images_of(self, equation: Equation) -> list[int]:
        """An equation's operands that are stored images."""
        of_images = (x for x in self.reader.variables(equation) if x in self.images)
        return [x for x in of_images if len(self.reader.program.avals[x].shape) > 2]

    def _read_by(self, ops: Sequence[Op], images: Sequence[int], like: int = -1) -> list[Op]:
        """Ops that read copies of some images, which lie like another one, or as images."""
        copies: list[Op] = []
        instead = {self.reader.buffer(x): self._copy(copies, x, like) for x in images}
        read = [tuple(instead.get(value, value) for value in op.inputs) for op in ops]
        return [*copies, *(op.but(inputs=inputs) for op, inputs in zip(ops, read, strict=True))]

    def _copy(self, copies: list[Op], image: int, like: int = -1) -> int:
        reader = self.reader
        read = reader.behind([image])
        key = ("as an image" if like < 0 else "by groups", *read)
        if key not in reader.copies:
            aval = reader.program.avals[image]
            item = compat.item_bytes(aval.dtype)
            size = _bytes_of_image(aval.shape, item) if like < 0 else self.bytes_of(image, item, like)
            made = reader.copies[key] = reader.new(size)
            if like >= 0 or image in self._behind([image])[1]:
                copies.append(Op(read, (made,), kind=Kind.OPAQUE, name="copy"))
            else:
                copies.append(self._computed_of_images(copies, image, made))
        return reader.copies[key]

    def _made_as_image(self, equation: Equation, ops: Sequence[Op], result: int) -> list[Op]:
        """What makes an image that is then copied to lie so."""
        aval = self.reader.program.avals[result]
        made = self.reader.new(_bytes_of_image(aval.shape, compat.item_bytes(aval.dtype)))
        self.reader.copies["as an image", *self.reader.behind([result])] = made
        ops = self._read_by(ops, [x for x in self._images_of(equation) if x in self.mixed])
        renamed = (op.but(outputs=tuple(made if value == result else value for value in op.outputs)) for op in ops)
        return [*renamed, Op((made,), (result,), kind=Kind.OPAQUE, name="copy")]

    def _computed_of_images(self, copies: list[Op], image: int, made: int) -> Op:
        inputs = self._read_as_images(copies, [image])
        return Op(inputs, (made,), kind=Kind.ELEMENTWISE, repeatable=False, name="copy")

    def _done_on_images(self, equation: Equation, ops: Sequence[Op]) -> list[Op]:
        """An equation's ops with all that is done on the way from images."""
        copies: list[Op] = []
        inputs = self._read_as_images(copies, self.reader.variables(equation))
        return [*copies, *(op.but(inputs=inputs) for op in ops)]

    def _read_as_images(self, copies: list[Op], values: Sequence[int]) -> tuple[int, ...]:
        others, leaves = self._behind(values)
        return (*(self._copy(copies, leaf) for leaf in sorted(leaves)), *others)

    def _is_done_on_images(self, reduction: Equation) -> bool:
        """Whether a reduction is of what is done on convolutions' results of which cotangents are computed."""
        leaves = self._behind(reduction.inputs[:1])[1]
        return reduction.inputs[0] not in leaves and leaves <= self._read_by_cotangents

    @functools.cached_property
    def _read_by_cotangents(self) -> frozenset[int]:
        """Convolutions' results that cotangents are computed of."""
        return self._behind(sorted(self.cotangents & self.mixed))[1].difference(self._done_beside)

    def _cotangent(self, copies: list[Op], image: int) -> int:
        """The copy in two bytes of a cotangent, computed as an image, that convolutions in groups read."""
        reader = self.reader
        key = ("cotangent", image)
        if key not in reader.copies:
            copy = reader.copies[key] = reader.new(self.bytes_of(image, 2))
            if image not in self.mixed:
                copies.append(Op(reader.behind([image]), (copy,), kind=Kind.ELEMENTWISE, repeatable=False, name="copy"))
                return copy
            computed = reader.new(_bytes_of_image(reader.program.avals[image].shape, 2))
            copies.append(self._computed_of_images(copies, image, computed))
            copies.append(Op((computed,), (copy,), kind=Kind.OPAQUE, name="copy"))
        return reader.copies[key]

    def _behind(self, values: Iterable[int | Constant]) -> tuple[tuple[int, ...], frozenset[int]]:
        """What values are computed of by elementwise work: buffers of others, and images that lie so."""
        others: dict[int, None] = {}
        waiting = [value for value in values if isinstance(value, int)]
        leaves, seen = set[int](), set(waiting)
        while waiting:
            value = waiting.pop()
            made = self.reader.producer.get(value)
            if value not in self.mixed and value not in self._steps:
                others.update(dict.fromkeys(self.reader.behind([value])))
            elif made is None or made.primitive not in ELEMENTWISE or value in self._done_beside:
                leaves.add(value)
            else:
                new = [x for x in self.reader.variables(made) if x not in seen]
                seen.update(new)
                waiting += new
        return tuple(others), frozenset(leaves)
