"""What a TPU's compiler adds where images are in parts (`tpu_parts.py`): parts with their neighbours' columns for each
convolution, images put together for who reads them whole, and shifted parts for the gradients of weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jax.extend.core import primitives as P

from remat_opt.compilers.tpu_parts import MOST_IMAGES, PARTS, Cut
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import LANES, bytes_with_features_or_batch_in_lanes, padded_bytes
from remat_opt.program import compat
from remat_opt.program.images import POOLS
from remat_opt.program.inline import Equation
from remat_opt.program.primitives import CONTRACTION, ELEMENTWISE

if TYPE_CHECKING:
    from remat_opt.compilers.tpu_reader import TpuReader

_MULTIPLIED = 2  # bytes of a number that a product reads


class Cutting:
    """Ops on images in parts.

    Parts that are made for a convolution are a buffer, with the elementwise work before them; an image that is put
    together is a copy of a buffer.
    """

    def __init__(self, reader: TpuReader):
        self.reader = reader
        self.parts = reader.parts

    def with_copies(self, equation: Equation, ops: Sequence[Op]) -> list[Op]:
        """An equation's ops, with those before them that make what it reads."""
        parts, result = self.parts, equation.outputs[0] if equation.outputs else None
        if result in parts.late:
            return self.gradient(equation, ops)
        before: list[Op] = []
        instead: dict[int, list[int]] = {}
        if result in parts.read:
            image, row = equation.inputs[0], parts.read[result]
            is_cut = isinstance(image, int) and image in parts.cut
            if isinstance(image, int) and (not is_cut or result in parts.resized or self.has_neighbours(image, row)):
                instead[image] = [self.cut_for(image, row, result in parts.resized, before)]
        elif result in parts.done:
            if result in parts.resized:
                instead = self.resized(equation, before)
        else:
            for x in self.cut_operands(equation):
                instead[x] = [self.whole(x, equation, before)]
            if equation.primitive is P.select_and_scatter_add_p or self.is_gradient_of_weights(equation):
                return self.in_tiles_of_images(equation, ops, instead, before)
        return [*before, *(self.reading(op, instead) for op in ops)]

    def is_gradient_of_weights(self, equation: Equation) -> bool:
        """Whether a convolution contracts the images of a batch."""
        if equation.primitive is not P.conv_general_dilated_p:
            return False
        image, result = equation.inputs[0], equation.outputs[0]
        return isinstance(image, int) and image in self.images and result not in self.images

    @functools.cached_property
    def images(self) -> frozenset[int]:
        return self.reader.images_with_inputs

    def in_tiles_of_images(
        self, equation: Equation, ops: Sequence[Op], instead: dict[int, list[int]], before: list[Op]
    ) -> list[Op]:
        """Ops that read whole images with batch and features in the tiles, and write them so: copies of a small batch,
        which lies otherwise elsewhere."""
        item = _MULTIPLIED if equation.primitive in CONTRACTION else 4
        batch, features = 0, -1
        if equation.primitive is P.conv_general_dilated_p:
            batch, features = equation.params["dimension_numbers"].lhs_spec[1::-1]
        for x in dict.fromkeys(x for x in equation.inputs if isinstance(x, int)):
            size = self.larger_in_tiles(x, item, batch, features)
            if size:
                read = instead.get(x, [x])
                instead[x] = self.add(before, read, [size], Kind.REDUCTION, "copy")
        (result,) = equation.outputs
        size = self.larger_in_tiles(result, item, batch, features)
        if not size or equation.primitive is P.conv_general_dilated_p:
            return [*before, *(self.reading(op, instead) for op in ops)]
        (op,) = ops
        padded = self.reader.new(size)
        scattered = dataclasses.replace(self.reading(op, instead), outputs=(padded,))
        return [*before, scattered, Op((padded,), (result,), seconds=op.seconds, name="copy")]

    def larger_in_tiles(self, x: int, item: int, batch: int, features: int) -> int:
        """Bytes of an image of a small batch with batch and features in the tiles; 0 where it lies so."""
        shape = self.shape(x)
        if len(shape) < 3 or shape[batch] > MOST_IMAGES:
            return 0
        size = bytes_with_features_or_batch_in_lanes(shape, item, batch, features % len(shape))
        return size if size > padded_bytes(shape, item) else 0

    def resized(self, equation: Equation, before: list[Op]) -> dict[int, list[int]]:
        """Operands that are cut otherwise first: of elementwise work those in narrower parts, which are padded, and of
        a pool the image, which is put together for that."""
        parts, (result,) = self.parts, equation.outputs
        if equation.primitive in POOLS:
            (image,) = self.cut_operands(equation)
            item = 2 if result in self.reader.rounded else self.item(image)
            return {image: [self.cut_again(image, parts.cut[image], item, before)]}
        row, instead = parts.cut[result], {}
        for x in self.cut_operands(equation):
            if parts.cut[x].width < row.width:
                key = ("padded", x, row)
                if key not in self.reader.copies:
                    size = self.bytes_of_parts(x, row, self.item(x))
                    (self.reader.copies[key],) = self.add(before, [x], [size], Kind.OPAQUE, "padded parts")
                instead[x] = [self.reader.copies[key]]
        return instead

    def cut_again(self, x: int, row: Cut, item: int, before: list[Op]) -> int:
        """An image that is put together and cut another way."""
        (whole,) = self.add(before, [x], [padded_bytes(self.shape(x), item)], Kind.REDUCTION, "copy")
        (made,) = self.add(before, [whole], [self.bytes_of_parts(x, row, item)], Kind.OPAQUE, "parts")
        return made

    def cut_operands(self, equation: Equation) -> list[int]:
        return [x for x in dict.fromkeys(equation.inputs) if isinstance(x, int) and x in self.parts.cut]

    def has_neighbours(self, image: int, row: Cut) -> bool:
        return row.width > self.parts.cut[image].width

    def reading(self, op: Op, instead: Mapping[int, Sequence[int]]) -> Op:
        """An op that reads other buffers."""
        buffers = {self.reader.buffer(x): others for x, others in instead.items()}
        inputs = (one for value in op.inputs for one in buffers.get(value, (value,)))
        return dataclasses.replace(op, inputs=tuple(dict.fromkeys(inputs)))

    def add(self, before: list[Op], read: Sequence[int], sizes: Sequence[int], kind: Kind, name: str) -> list[int]:
        """An op that makes buffers of some sizes."""
        made = [self.reader.new(size) for size in sizes]
        seconds = sum(sizes) / self.reader.rates.bandwidth
        before.append(Op(self.reader.behind(read), tuple(made), kind=kind, seconds=seconds, name=name))
        return made

    def shape(self, x: int) -> tuple[int, ...]:
        return tuple(self.reader.program.avals[x].shape)

    def item(self, x: int) -> int:
        """Bytes of a value's numbers."""
        return 2 if x in self.reader.rounded else compat.item_bytes(self.reader.program.avals[x].dtype)

    def lies_in_rows(self, x: int, cut: Cut) -> bool:
        """Whether parts are made by arithmetic that has another dimension than the features in the lanes, as that
        pads less: what it reads and makes is copied."""
        shape = cut.shape_of(self.shape(x))
        others = [size for at, size in enumerate(shape) if at not in (cut.batch, cut.features, cut.space)]
        padded = [-(-size // LANES) * LANES / size for size in (shape[cut.features], *others) if size]
        return bool(padded) and min(padded) < padded[0]

    def bytes_of_parts(self, x: int, cut: Cut, item: int) -> int:
        return bytes_with_features_or_batch_in_lanes(cut.shape_of(self.shape(x)), item, cut.batch, cut.features)

    def whole(self, x: int, reader: Equation | None, before: list[Op]) -> int:
        """An image that is put together of its parts."""
        item = _MULTIPLIED if reader is not None and reader.primitive in CONTRACTION else self.item(x)
        key = ("whole", x, item)
        if key not in self.reader.copies:
            size = padded_bytes(self.shape(x), item)
            (self.reader.copies[key],) = self.add(before, [self.own(x)], [size], Kind.OPAQUE, "copy")
        return self.reader.copies[key]

    def cut_for(self, image: int, row: Cut, is_resized: bool, before: list[Op]) -> int:
        """Parts of an image for a convolution, and beside them what a gradient of weights reads.

        Columns of neighbours are buffers by themselves, and small, but where the row is cut for this convolution.
        """
        key, own = ("parts", image, row), ("own parts", image)
        if key in self.reader.copies:
            return self.reader.copies[key]
        read, kind = [image], Kind.REDUCTION
        if is_resized:
            (whole,) = self.add(before, [image], [padded_bytes(self.shape(image), _MULTIPLIED)], kind, "copy")
            read, kind = [whole], Kind.OPAQUE
        cut = row if is_resized else self.parts.cut.get(image, row)
        sizes = [self.bytes_of_parts(image, cut, _MULTIPLIED)]
        if own not in self.reader.copies:
            sizes += self.beside_parts(image, row)
        lies_in_rows = not is_resized and self.lies_in_rows(image, cut)
        if lies_in_rows:
            read = self.add(before, read, [self.bytes_of_parts(image, cut, _MULTIPLIED)], kind, "copy")
        made = self.add(before, read, sizes, kind, "parts")
        if lies_in_rows:
            made[:1] = self.add(before, made[:1], sizes[:1], Kind.OPAQUE, "copy")
        self.reader.copies[key] = made[0]
        if len(made) > 1:
            self.reader.copies[own] = made[1]
        return made[0]

    def beside_parts(self, image: int, row: Cut) -> list[int]:
        """Bytes of what is made for gradients of weights beside parts for a convolution: the same parts in which what
        lies behind the end of the row is not masked, or of a whole image the padded row."""
        gradients = [user for user in self.reader.readers[image] if user.outputs and user.outputs[0] in self.parts.late]
        late = [user for user in gradients if user.inputs[self.parts.late[user.outputs[0]]] == image]
        if image in self.parts.cut:
            is_shifted = any(
                user.inputs[0] == image and user not in late and self.shifts(user) > 1 for user in gradients
            )
            is_put_together = any(not self.lies_so(image, self.late_cut(user)) for user in late)
            if is_shifted or (is_put_together and not self.is_behind_a_product(image)):
                return [self.bytes_of_parts(image, self.parts.cut[image], _MULTIPLIED)]
        elif late:
            shape = list(self.shape(image))
            shape[row.space] = max(shape[row.space], PARTS * self.late_cut(late[0]).width)
            return [padded_bytes(shape, _MULTIPLIED)]
        return []

    def is_behind_a_product(self, x: int) -> bool:
        """Whether a value comes out of the kernel of a product, with elementwise work behind that."""
        maker = self.reader.producer.get(x)
        if maker is None or maker.primitive in CONTRACTION:
            return maker is not None
        return maker.primitive in ELEMENTWISE and any(
            self.is_behind_a_product(one)
            for one in maker.inputs
            if isinstance(one, int) and len(self.reader.readers[one]) == 1
        )

    def shifts(self, equation: Equation) -> int:
        """How often a gradient of weights reads its image, each time shifted by a column."""
        return self.shape(equation.outputs[0])[equation.params["dimension_numbers"].out_spec[-1]]

    def gradient(self, equation: Equation, ops: Sequence[Op]) -> list[Op]:
        """A gradient of weights on parts of the image and of the result's gradient."""
        before: list[Op] = []
        late = self.parts.late[equation.outputs[0]]
        image, gradient = equation.inputs
        if not isinstance(image, int) or not isinstance(gradient, int):
            return list(ops)
        cut = self.late_cut(equation)
        other = self.late_parts((image, gradient)[late], cut, equation, before)
        shifted = self.shifted(image, equation, other if late == 0 else None, cut, before)
        instead = {image: shifted, gradient: [gradient if late == 0 else other]}
        return [*before, *(self.reading(op, instead) for op in ops)]

    def late_cut(self, equation: Equation) -> Cut:
        """How a gradient of weights cuts the operand that is cut for it alone."""
        late = self.parts.late[equation.outputs[0]]
        numbers, dilation = equation.params["dimension_numbers"], equation.params["rhs_dilation"][-1]
        early = equation.inputs[1 - late]
        assert isinstance(early, int), "the operand whose parts are there"
        width = self.parts.cut[early].width
        width = width * dilation if late == 0 else -(-width // dilation)
        spec = (numbers.lhs_spec, numbers.rhs_spec)[late]
        return Cut(spec[1], spec[0], spec[-1], width)  # which has batch and features the other way round

    def lies_so(self, x: int, cut: Cut) -> bool:
        """Whether a value is in parts as a gradient of weights reads them."""
        return self.parts.cut.get(x) == cut and not cut.is_padded(self.shape(x))

    def late_parts(self, x: int, cut: Cut, equation: Equation, before: list[Op]) -> int:
        """Parts of what is whole, or was put together for that."""
        if self.lies_so(x, cut):
            return next((made for key, made in self.reader.copies.items() if key[:2] == ("parts", x)), x)
        key = ("late parts", x, cut)
        if key not in self.reader.copies:
            self.cut_for_convolutions(x, before)
            read = self.whole(x, equation, before) if x in self.parts.cut else self.own(x)
            size = self.bytes_of_parts(x, cut, _MULTIPLIED)
            kind = Kind.OPAQUE if x in self.parts.cut else Kind.REDUCTION
            (self.reader.copies[key],) = self.add(before, [read], [size], kind, "parts")
        return self.reader.copies[key]

    def cut_for_convolutions(self, x: int, before: list[Op]) -> None:
        """Parts of an image for convolutions, as a gradient of weights reads what is made beside them."""
        for user in self.reader.readers[x]:
            result = user.outputs[0] if user.outputs else None
            if result not in self.parts.read or result in self.parts.resized or user.inputs[0] != x:
                continue
            row = self.parts.read[result]
            if x not in self.parts.cut or self.has_neighbours(x, row):
                self.cut_for(x, row, False, before)

    def own(self, x: int) -> int:
        """What is made beside parts of an image, or the image."""
        return self.reader.copies.get(("own parts", x), x)

    def shifted(self, image: int, equation: Equation, late: int | None, cut: Cut, before: list[Op]) -> list[int]:
        """An image's parts as they are and shifted: as one buffer where they were made for a convolution, too."""
        shifts = self.shifts(equation)
        if late is None:
            cut = self.parts.cut[image]
            own = self.own(image)
            given = next((made for key, made in self.reader.copies.items() if key[:2] == ("parts", image)), own)
        else:
            own = given = late
        if shifts == 1:
            return [own]
        size = self.bytes_of_parts(image, cut, _MULTIPLIED)
        shifted = self.add(before, [given], [size] * (shifts - 1), Kind.REDUCTION, "shifted parts")
        if self.lies_in_rows(image, cut):
            shifted = [self.add(before, [one], [size], Kind.OPAQUE, "copy")[0] for one in shifted]
        if late is not None:
            return [*shifted, own]
        return self.add(before, [*shifted, own], [shifts * size], Kind.OPAQUE, "stacked parts")
