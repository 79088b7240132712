"""How XLA's TPU compiler stores what a program computes: in tiles, of which a program's images have their own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence, Set

import jax.numpy as jnp
from jax.extend.core import primitives as P

from remat_opt.compilers import tpu, tpu_convolutions, tpu_products, tpu_transforms
from remat_opt.compilers.equations import (
    CUTTING,
    WINDOWED,
    draws_by_arithmetic,
    is_spread,
    is_strided,
    merges_examples,
    mixes_dimensions,
    multiplies_only,
)
from remat_opt.compilers.reader import Reader
from remat_opt.compilers.tpu_clock import RUNS_OF_A_BODY
from remat_opt.compilers.tpu_cutting import Cutting
from remat_opt.compilers.tpu_gradients import lying_for_gradients
from remat_opt.compilers.tpu_grouped_convolutions import Grouped
from remat_opt.compilers.tpu_groups import Groups
from remat_opt.compilers.tpu_indexing import seconds_by_index
from remat_opt.compilers.tpu_masks import Packed, packed_masks, with_words
from remat_opt.compilers.tpu_meetings import with_meetings
from remat_opt.compilers.tpu_ordering import as_loops_read
from remat_opt.compilers.tpu_parts import Parts, parts_of
from remat_opt.compilers.tpu_precision import stored_in_two_bytes
from remat_opt.compilers.tpu_products import lying_between, scores_behind_barriers, with_scores_turned
from remat_opt.compilers.tpu_rows import Rows, with_row_copies
from remat_opt.compilers.tpu_tiles import stacks_of_images
from remat_opt.compilers.tpu_turned import Turned
from remat_opt.graph.graph import Kind, Op
from remat_opt.graph.tiles import (
    bytes_before_merging,
    bytes_with_first_in_lanes,
    padded_bytes,
)
from remat_opt.program import compat
from remat_opt.program.images import images_of, with_merged_batch
from remat_opt.program.inline import Constant, Equation
from remat_opt.program.primitives import CONTRACTION, REDUCTION, RESHAPING

MOST_JOINED = 4  # arrays that a concatenation is of as the maximum of padded ones, which is elementwise


class TpuReader(Reader):
    """Reads a program as a TPU's compiler does.

    Attributes:
        bodies: by the id of its jaxpr, a body's buffers once its peak was asked for, as `Op.inside`.
        tables: in the same way the bytes of its tables of addresses.
        images_of_bodies: in the same way which of its results are images, by their places.
        seconds_of_body: the time that XLA takes one run of a body to need; its arguments are `peak_of_body`'s.
        loop: of a loop's body how many constants it is given first, and how much it carries behind these.
        as_stacks: what lies as the stacks of images that it is made of, once the program is read.
    """

    bodies: Mapping[int, tuple[tuple[int, int, int], ...]]
    tables: Mapping[int, int]
    images_of_bodies: Mapping[int, frozenset[int]]
    seconds_of_body: Callable[..., float]
    loop: tuple[int, int] | None = None
    as_stacks: Set[int] = frozenset()

    @functools.cached_property
    def rounded(self) -> frozenset[int]:
        """What is stored in two bytes. Of padded parts sums are made later, behind what masks the padding."""
        constants = self.program.inputs[: self.loop[0]] if self.loop else ()
        found = stored_in_two_bytes(self.program, constants)
        return found.difference(value for value in found if value in self.parts.cut and self.is_summed_masked(value))

    def is_summed_masked(self, value: int) -> bool:
        is_summed = any(reader.primitive in REDUCTION for reader in self.readers.get(value, ()))
        return is_summed and self.parts.cut[value].is_padded(self.program.avals[value].shape)

    @functools.cached_property
    def parts(self) -> Parts:
        """What is done on parts of images."""
        return parts_of(self.program)

    @functools.cached_property
    def images(self) -> frozenset[int]:
        """Images that lie as such; the program's inputs come as they pad least."""
        return self.images_with_inputs.difference(self.program.inputs)

    @functools.cached_property
    def images_with_inputs(self) -> frozenset[int]:
        return images_of(self.program)

    @functools.cached_property
    def groups(self) -> Groups:
        return Groups(self, self.images_with_inputs, self.loop)

    @functools.cached_property
    def cutting(self) -> Cutting:
        return Cutting(self)

    def shapes_of_loops(self) -> dict[int, tuple[int, ...]]:
        """By a kernel's result over which array it goes: that, or what is reduced."""
        avals = self.program.avals
        shapes = {value: aval.shape for value, aval in enumerate(avals) if aval.size > 1 or compat.is_key(aval)}
        for one in self.equations:
            if one.primitive in REDUCTION or tpu_products.arithmetic_of(one, self.program) is Kind.REDUCTION:
                reduced = [avals[x] for x in one.inputs if isinstance(x, int)]
                largest = max(reduced, key=lambda aval: aval.size, default=None)
                if largest is not None:
                    shapes.update(dict.fromkeys(one.outputs, largest.shape))
        return shapes

    def ops_at(self, index: int, equation: Equation) -> Sequence[Op]:
        copies = self.groups.copied_before(equation)
        ops = [*copies, *self.cutting.with_copies(equation, super().ops_at(index, equation))]
        ops = self.grouped.with_copies(equation, self.turned.with_copies(equation, ops))
        return with_words(self, equation, with_scores_turned(self, equation, ops))

    @functools.cached_property
    def grouped(self) -> Grouped:
        """What lies as convolutions in groups have it."""
        return Grouped(self, self.images_with_inputs)

    @functools.cached_property
    def turned(self) -> Turned:
        return Turned(self)

    def finish(self) -> None:
        for value, op in self.turned.copied_back().items():
            self.ops.append(op)
            self.equations.append(self.producer[value])
            self.same[value] = op.outputs
        self.as_stacks = with_meetings(self, stacks_of_images(self))
        super().finish()

    def may_go(self, op: Op, equation: Equation) -> bool:
        """Beside convolutions in groups copies are read instead of what is done elementwise."""
        is_copied = bool(self.grouped.mixed) and (op.kind is Kind.ELEMENTWISE or op.name == "copy")
        return is_copied or super().may_go(op, equation)

    def is_renamed(self, equation: Equation) -> bool:
        """Rows of another length lie otherwise in tiles; the first of a tile's features are there as they are."""
        if equation.primitive is P.slice_p:
            return self.fills_as_many_tiles(equation)
        return super().is_renamed(equation) and not self.is_copied(equation)

    def is_copied(self, reshape: Equation) -> bool:
        """Whether a reshape is a kernel."""
        return mixes_dimensions(reshape, self.program) or self.groups.makes_image(reshape)

    def fills_as_many_tiles(self, cut: Equation) -> bool:
        """Whether a slice is an image from its beginning, with as many tiles."""
        whole, (piece,) = cut.inputs[0], cut.outputs
        if not isinstance(whole, int) or not self.images.issuperset((whole, piece)) or is_strided(cut):
            return False
        avals = self.program.avals[whole], self.program.avals[piece]
        before, after = (padded_bytes(aval.shape, compat.item_bytes(aval.dtype), is_image=True) for aval in avals)
        return before == after and not any(cut.params["start_indices"])

    def rename(self, equation: Equation) -> None:
        """What has another shape is an image that is put together."""
        cut = self.cutting.cut_operands(equation)
        if not cut:
            super().rename(equation)
            return
        ops: list[Op] = []
        self.same[equation.outputs[0]] = (self.cutting.whole(cut[0], None, ops),)
        self.ops += ops
        self.equations += [equation] * len(ops)

    def barrier(self, equation: Equation) -> None:
        """A barrier holds images, and no parts."""
        ops = self.groups.copied_before(equation)
        cut = self.cutting.cut_operands(equation)
        whole = {x: self.cutting.whole(x, None, ops) for x in cut if x not in self.constants}
        whole |= self.grouped.held_by(equation, ops)
        self.ops += ops
        self.equations += [equation] * len(ops)
        inputs = tuple(whole.get(x, x) if isinstance(x, int) else x for x in equation.inputs)
        super().barrier(dataclasses.replace(equation, inputs=inputs))

    @functools.cached_property
    def rows(self) -> Rows:
        """What lies row by row, and what is made of rows."""
        return Rows(self.program)

    @functools.cached_property
    def as_products_read(self) -> Mapping[int, int]:
        """What lies with the batch of products outside of the tiles: the places that each takes."""
        spectra = tpu_transforms.places_of_spectra(self.program)
        return {**spectra, **tpu_products.complex_for_products(self.program), **self.between_products}

    @functools.cached_property
    def between_products(self) -> Mapping[int, int]:
        """What lies between products over a batch, with the places that it takes."""
        return lying_between(self.program, self.images_with_inputs)

    @functools.cached_property
    def for_gradients(self) -> Mapping[int, tuple[int, int]]:
        """What lies as gradients of weights have it, with its dimensions in the lanes and sublanes."""
        return lying_for_gradients(self.program)

    @functools.cached_property
    def scores_behind_barriers(self) -> frozenset[int]:
        """Attention's scores that barriers return."""
        return scores_behind_barriers(self.program)

    def ops_of(self, equation: Equation) -> Sequence[Op]:
        ops = [self.as_kernel(equation, op) for op in super().ops_of(equation)]
        if self.is_one_key(equation):
            # Its words are cut of what they are drawn in, and stored.
            return [dataclasses.replace(op, kind=Kind.ELEMENTWISE, repeatable=False) for op in ops]
        if self.is_copied(equation):
            return [dataclasses.replace(op, kind=Kind.OPAQUE) for op in ops]
        if equation.primitive in (P.scan_p, P.cond_p):
            (op,) = ops
            rounded, waiting, inside = {}, 0, ()
            if equation.primitive is P.scan_p:
                rounded = self.rounded_before(equation)
                waiting = self.merged_before(equation) + self.slices_of_stacks(equation)
                op = dataclasses.replace(op, inputs=self.groups.read_by_loop(equation, op.inputs))
                inside = self.inside(equation, waiting)
                op = op.but(inputs=as_loops_read(equation, op.inputs))
            inputs = tuple(rounded[value].outputs[0] if value in rounded else value for value in op.inputs)
            seconds, workspace = (
                self.seconds_of_bodies(equation),
                op.workspace + waiting,
            )
            tables = sum(self.tables.get(id(jaxpr), 0) for jaxpr in compat.jaxprs_in(equation.params))
            op = op.but(
                inputs=inputs, seconds=seconds, workspace=workspace, tables=tables, inside=inside, in_tuple=True
            )
            return [*rounded.values(), op]
        if equation.primitive is P.fft_p:
            (op,) = ops
            return tpu_transforms.by_products(self, equation, op)
        if equation.primitive is P.conv_general_dilated_p:
            (op,) = ops
            return tpu_convolutions.with_copies(self, equation, op)
        if equation.primitive in (P.gather_p, P.scatter_add_p):
            (op,) = ops
            return with_row_copies(self, equation, op)
        if equation.primitive is P.concatenate_p:
            (op,) = ops
            return tpu_convolutions.with_pieces_cut(self, equation, op)
        if equation.primitive is not P.dot_general_p or tpu_products.arithmetic_of(equation, self.program):
            return ops
        (op,) = ops
        if not self.lying_as_transforms.isdisjoint(equation.inputs):
            op = dataclasses.replace(op, of_buffers=True)
        return tpu_products.with_copies(self, equation, op)

    @functools.cached_property
    def merged(self) -> Mapping[int, tuple[int, ...]]:
        """Images that lie with one dimension for all examples, with their shapes so."""
        merged = with_merged_batch(self.program)
        return {value: shape for value, shape in merged.items() if value not in self.program.inputs}

    @functools.cached_property
    def masks(self) -> Mapping[int, Packed]:
        """Masks that are stored in bits."""
        return packed_masks(self.program, self.images_with_inputs, self.merged)

    @functools.cached_property
    def lying_as_transforms(self) -> frozenset[int]:
        """What lies as transforms make it."""
        return tpu_transforms.lying_as_transforms(self.program)

    def is_one_key(self, equation: Equation) -> bool:
        """Whether an equation takes one random key out of several."""
        avals = [self.program.avals[x] for x in equation.outputs]
        is_cut = equation.primitive.name == "random_wrap" or equation.primitive is P.slice_p
        return is_cut and all(compat.is_key(aval) and aval.size == 1 for aval in avals)

    def as_kernel(self, equation: Equation, op: Op) -> Op:
        """How a TPU's compiler takes an op: what it fuses with what, and how long that takes."""
        arithmetic = tpu_products.arithmetic_of(equation, self.program)
        if arithmetic is not None:
            name = P.mul_p.name if arithmetic is Kind.ELEMENTWISE else P.reduce_sum_p.name
            op = dataclasses.replace(op, kind=arithmetic, name=name)
        elif equation.primitive in CONTRACTION or equation.primitive in WINDOWED:
            op = dataclasses.replace(op, kind=Kind.PRODUCT, of_buffers=equation.params.get("of_buffers", False))
        elif self.is_padded_for_windows(equation):
            pass  # the window is dilated instead
        elif equation.primitive is P.concatenate_p:
            op = self.joined(equation, op)
        elif equation.primitive in CUTTING:
            kind = Kind.OPAQUE if is_spread(equation) else op.kind
            of_buffers = equation.primitive is P.pad_p or is_strided(equation)
            op = dataclasses.replace(op, kind=kind, of_views=True, of_buffers=of_buffers)
        elif draws_by_arithmetic(equation, self.program):
            op = dataclasses.replace(op, kind=Kind.ELEMENTWISE)
        elif not self.is_scattered_into_zeros(equation):
            op = dataclasses.replace(op, seconds=seconds_by_index(equation, self.program) or op.seconds)
        return op

    def is_padded_for_windows(self, equation: Equation) -> bool:
        """Whether a pad is part of the windows that alone read its result."""
        if equation.primitive is not P.pad_p:
            return False
        readers = self.readers.get(equation.outputs[0], [])
        return bool(readers) and all(reader.primitive in WINDOWED for reader in readers)

    def joined(self, equation: Equation, op: Op) -> Op:
        """A concatenation on a TPU: of all that concatenations among its operands are of."""
        pieces = self.pieces_of(equation)
        kind = Kind.OPAQUE if len(pieces) > MOST_JOINED else op.kind
        return dataclasses.replace(op, inputs=self.behind(pieces), kind=kind, workspace=0)

    def pieces_of(self, equation: Equation) -> list[int]:
        """What a concatenation puts side by side, with that of concatenations among it along the same dimension."""
        found: list[int] = []
        for x in equation.inputs:
            if isinstance(x, Constant) or x in self.constants:
                continue
            maker = self.producer.get(x)
            if maker is not None and maker.primitive is P.concatenate_p and maker.params == equation.params:
                found += self.pieces_of(maker)
            else:
                found.append(x)
        return found

    def rounded_before(self, loop: Equation) -> dict[int, Op]:
        """Of what only products read in all turns of a loop, by its buffer, the copies in two bytes that XLA takes out
        of the loop."""
        constants, _ = compat.scan_counts(loop.params)
        found: dict[int, Op] = {}
        for x in self.variables(dataclasses.replace(loop, inputs=loop.inputs[:constants])):
            aval = self.program.avals[x]
            if aval.dtype != jnp.float32 or x in self.rounded or not aval.size or not multiplies_only(loop, x):
                continue
            copy = self.new(padded_bytes(aval.shape, 2))
            found[self.buffer(x)] = Op(self.behind([x]), (copy,), kind=Kind.ELEMENTWISE, name="convert_element_type")
        return found

    def inside(self, loop: Equation, waiting: int) -> tuple[tuple[int, int, int], ...]:
        """Buffers of a loop's body, and of what waits until it is done."""
        body = self.bodies.get(id(loop.params["jaxpr"]), ())
        last = max((until for _, _, until in body), default=0)
        return (*body, (waiting, 0, last)) if waiting else body

    def merged_before(self, loop: Equation) -> int:
        """Bytes of copies of images that wait until a loop is done: XLA makes one dimension of those that number the
        examples before the loop, and carries what it made that of, which nothing reads any more, in the device's
        memory."""
        constants, _ = compat.scan_counts(loop.params)
        waiting = 0
        for at, x in enumerate(loop.inputs[:constants]):
            if not isinstance(x, int) or len(self.program.avals[x].shape) < 5 or not multiplies_only(loop, x):
                continue
            if merges_examples(loop.params["jaxpr"], at):
                waiting += bytes_before_merging(self.program.avals[x].shape, 2)
        return waiting

    def slices_of_stacks(self, equation: Equation) -> int:
        """Bytes of what a loop puts into a stack, or takes from one, in a turn, where the turns are in the lanes of the
        stack, so that those of the slice are filled up to 128, too, and where not both are on the chip."""
        constants, carries = compat.scan_counts(equation.params)
        stacks = (*equation.inputs[constants + carries :], *equation.outputs[carries:])
        avals = [self.program.aval_of(x) for x in stacks if x not in self.images]
        slices = (bytes_with_first_in_lanes(aval.shape, compat.item_bytes(aval.dtype)) for aval in avals)
        return max((size for size in slices if 2 * size > tpu.ON_CHIP), default=0)

    def kept_between_steps(self) -> frozenset[int]:
        """Arguments of which one may lie on the chip when a step begins: those that products alone read, as they are.
        (XLA takes others for activations: `LooksLikeAnActivation` in its `memory_space_assignment`.)"""
        found: set[int] = set()
        for given in self.program.inputs:
            waiting, is_left = [given], True
            while waiting and is_left:
                value = waiting.pop()
                for reader in self.readers.get(value, ()):
                    if reader.primitive is compat.barrier_p:
                        waiting.append(reader.outputs[reader.inputs.index(value)])
                    elif reader.primitive in RESHAPING or reader.primitive is P.transpose_p:
                        waiting += reader.outputs
                    elif reader.primitive not in CONTRACTION:
                        is_left = False
                is_left = is_left and value not in self.program.outputs
            if is_left and given in self.readers:
                found.add(given)
        return frozenset(found - self.donated)

    def seconds_of_bodies(self, equation: Equation) -> float:
        """Seconds that XLA takes a loop or the branches of a condition to need."""
        bodies = compat.jaxprs_in(equation.params)
        once = sum(self.seconds_of_body(equation.primitive, equation.params, jaxpr) for jaxpr in bodies)
        return once * (RUNS_OF_A_BODY if equation.primitive is P.scan_p else 1)

    def accumulated(self) -> frozenset[int]:
        """Results of reductions over other dimensions than the last alone, which lies in a tile's lanes."""
        found: set[int] = set()
        for equation in self.program.equations:
            if equation.primitive in REDUCTION and isinstance(equation.inputs[0], int):
                axes, rank = set(equation.params.get("axes", ())), len(self.program.avals[equation.inputs[0]].shape)
                if len(axes) == rank or rank - 1 not in axes:
                    found.update(equation.outputs)
        return frozenset(found)
