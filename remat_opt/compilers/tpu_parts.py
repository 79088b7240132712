"""Which images a TPU's compiler cuts into parts.

A batch that fills no tile is made eight times as large: eight parts of each row lie side by side in the batch
(`space_to_batch_converter.cc`). A convolution begins with that, and what is made of its result goes on with parts as
far as each operation can; who cannot reads the image put together again.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from jax import lax
from jax.extend.core import primitives as P

from remat_opt.program import compat
from remat_opt.program.images import POOLS
from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE, MOVES, REDUCTION, named

PARTS = 8  # of a row
MOST_IMAGES = 7
_SHORTEST_ROW = 2 * PARTS
_SHORTEST_DILATED_ROW = 3 * PARTS
_STEPS_TO_A_POOL = 10
_STEPS_OF_A_BARRIER = 3  # a tuple, the barrier, and what takes the tuple apart
_ARITHMETIC = ELEMENTWISE - MOVES - {P.iota_p}
_RENAMING = named("name stop_gradient copy")
_REDUCING = REDUCTION & named("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How an image is cut.

    Attributes:
        batch: the dimension of the images.
        features: that of their features.
        space: the dimension that is cut, a row.
        width: of a part.
    """

    batch: int
    features: int
    space: int
    width: int

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of an image's parts."""
        sizes = list(shape)
        sizes[self.batch] *= PARTS
        sizes[self.space] = self.width
        return tuple(sizes)

    def is_padded(self, shape: Sequence[int]) -> bool:
        """Whether parts of an image have more columns than the image."""
        return self.width * PARTS != shape[self.space]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What is done on parts.

    Attributes:
        cut: for each value that is there in parts how.
        done: first results of the equations that are done on parts.
        read: for each convolution of these (by its result) how its image is cut for it, with its neighbours' columns.
        resized: first results of the equations for which operands are cut otherwise first.
        late: for each weights' gradient of these which of its operands is cut for it alone, as it is whole.
    """

    cut: dict[int, Cut]
    done: set[int]
    read: dict[int, Cut]
    resized: set[int]
    late: dict[int, int]


def parts_of(program: Program) -> Parts:
    """What a TPU's compiler does on parts of images."""
    return _Cutter(program).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A convolution along the row that may be cut, as `ConvDetails` has it."""

    image: int  # elements before padding
    result: int
    kernel: int  # with what dilates it
    stride: int
    low: int
    high: int
    dilation: int  # of the image

    @property
    def padded(self) -> int:
        return self.image + (0 if self.dilation > 1 else self.low) + self.high

    @property
    def overlap(self) -> int:
        return self.kernel if self.dilation == self.low else self.kernel - 1

    @property
    def neighbours(self) -> int:
        """Columns of other parts that one needs."""
        return self.overlap // self.dilation if self.dilation > 1 else self.kernel - 1

    def least_width(self) -> int:
        per_part = -(-self.result // PARTS)
        return -(-per_part // self.dilation) * self.stride

    def result_width(self, read: int) -> int:
        """Of a part, from that of one with its neighbours' columns."""
        if self.dilation == 1:
            return (read - self.kernel) // self.stride + 1
        low = self.low if self.low != self.dilation else 0
        high = self.dilation - 1 if self.low == 0 else self.overlap % self.dilation
        return (read - 1) * self.dilation + 1 + low + high - self.kernel + 1


def row_of(equation: Equation, image: Sequence[int], kernel: Sequence[int], result: Sequence[int]) -> _Row:
    """A convolution along its last dimension of space."""
    numbers, params = equation.params["dimension_numbers"], equation.params
    size = kernel[numbers.rhs_spec[-1]]
    low, high = params["padding"][-1]
    return _Row(
        image=image[numbers.lhs_spec[-1]],
        result=result[numbers.out_spec[-1]],
        kernel=(size - 1) * params["rhs_dilation"][-1] + 1,
        stride=params["window_strides"][-1],
        low=low,
        high=high,
        dilation=params["lhs_dilation"][-1],
    )


def _cut_by(spec: Sequence[int], width: int) -> Cut:
    """How an image is cut that a convolution reads or writes by a specification of its dimensions."""
    return Cut(spec[0], spec[1], spec[-1], width)


class _Cutter:
    """Goes through a program as the compiler's pass does."""

    def __init__(self, program: Program):
        self.program = program
        self.parts = Parts({}, set(), {}, set(), {})
        self.producer = {value: equation for equation in program.equations for value in equation.outputs}
        self.users: dict[int, list[Equation]] = collections.defaultdict(list)
        for equation in program.equations:
            for value in dict.fromkeys(x for x in equation.inputs if isinstance(x, int)):
                self.users[value].append(equation)

    def run(self) -> Parts:
        convolutions = [e for e in self.program.equations if e.primitive is P.conv_general_dilated_p]
        for equation in convolutions:
            if self.is_suitable(equation) and equation.outputs[0] not in self.parts.done:
                self.begin(equation)
        return self.parts

    def shape(self, x: int | Constant) -> tuple[int, ...]:
        return tuple(self.program.aval_of(x).shape)

    def row(self, equation: Equation) -> _Row:
        image, kernel = equation.inputs
        return row_of(equation, self.shape(image), self.shape(kernel), self.shape(equation.outputs[0]))

    def is_suitable(self, equation: Equation) -> bool:
        """`IsConvSuitableForSpaceToBatch`."""
        numbers, params = equation.params["dimension_numbers"], equation.params
        if len(numbers.lhs_spec) < 3 or params["batch_group_count"] != 1:
            return False
        row = self.row(equation)
        if params["rhs_dilation"][-1] != 1 and self.shape(equation.inputs[1])[numbers.rhs_spec[-1]] >= row.result:
            return False
        if row.dilation != 1:
            fits = row.kernel == 1 if row.low == 0 else row.low in (row.dilation - 1, row.dilation)
            if row.stride != 1 or not fits:
                return False
            if row.low == row.dilation and row.padded < _SHORTEST_DILATED_ROW:
                return False
        if self.shape(equation.inputs[0])[numbers.lhs_spec[0]] > MOST_IMAGES:
            return False
        return row.neighbours <= -(-row.padded // PARTS)

    def begin(self, equation: Equation) -> None:
        """Cut a convolution's image for it (`PerformSpaceToBatchOnConvolution`)."""
        row = self.row(equation)
        if row.padded < _SHORTEST_ROW:
            return
        width = row.least_width()
        while width * PARTS < row.padded:
            width += row.stride
        pool = self.stride_of_pool(equation.outputs[0], len(self.shape(equation.outputs[0])))
        while width // row.stride % pool:
            width += row.stride
        self.convolve(equation, row, width, width + row.neighbours)
        self.go_on(equation)

    def convolve(self, equation: Equation, row: _Row, width: int, read: int) -> None:
        numbers, (result,) = equation.params["dimension_numbers"], equation.outputs
        self.parts.done.add(result)
        self.parts.read[result] = _cut_by(numbers.lhs_spec, read)
        self.parts.cut[result] = _cut_by(numbers.out_spec, row.result_width(read))

    def stride_of_pool(self, value: int, rank: int) -> int:
        """By which the pool strides that a convolution's result leads to."""
        seen: set[tuple[int, int]] = set()
        waiting = [(value, _STEPS_TO_A_POOL)]
        while waiting:
            value, steps = waiting.pop()
            if steps <= 0 or (value, steps) in seen:
                continue
            seen.add((value, steps))
            for user in self.users[value]:
                if user.primitive in POOLS or user.primitive is P.select_and_scatter_add_p:
                    strides = user.params["window_strides"]
                    return strides[-2] if len(strides) == rank else 1
                if user.primitive in (P.conv_general_dilated_p, P.pad_p, P.transpose_p):
                    continue
                taken = _STEPS_OF_A_BARRIER if user.primitive is compat.barrier_p else 1
                waiting += [(made, steps - taken) for made in user.outputs]
        return 1

    def go_on(self, first: Equation) -> None:
        """`PropagateOnUsers`."""
        waiting = collections.deque(first.outputs)
        while waiting:
            value = waiting.popleft()
            for user in self.users[value]:
                if user.outputs and user.outputs[0] not in self.parts.done and self.takes_parts(user, value):
                    self.parts.done.add(user.outputs[0])
                    waiting += [made for made in user.outputs if made in self.parts.cut]

    def takes_parts(self, user: Equation, value: int) -> bool:
        """Whether an equation is done on parts of a value, with how its results are cut then."""
        primitive = user.primitive
        if primitive is P.conv_general_dilated_p:
            return self.convolved(user, value) or self.is_gradient(user, value)
        if primitive in POOLS:
            return self.pooled(user, value)
        if primitive is P.select_and_scatter_add_p:
            return self.scattered(user)
        if primitive in _REDUCING:
            cut, axes = self.parts.cut[value], user.params["axes"]
            return cut.space in axes and (cut.batch in axes or self.shape(value)[cut.batch] == 1)
        if primitive in _ARITHMETIC or primitive in _RENAMING:
            return self.computed(user)
        return self.moved(user, value)

    def computed(self, user: Equation) -> bool:
        (result,) = user.outputs[:1]
        cuts = {x: self.parts.cut[x] for x in user.inputs if isinstance(x, int) and x in self.parts.cut}
        one = next(iter(cuts.values()))
        for x in user.inputs:
            if x not in cuts and not self.is_spread(x, one.space):
                return False
        if any((cut.batch, cut.space) != (one.batch, one.space) for cut in cuts.values()):
            return False
        widths = {cut.width for cut in cuts.values()}
        if len(widths) > 1:
            if len(user.inputs) < 2:
                return False
            self.parts.resized.add(result)
        self.parts.cut.update(dict.fromkeys(user.outputs, dataclasses.replace(one, width=max(widths))))
        return True

    def is_spread(self, x: int | Constant, space: int) -> bool:
        """Whether an operand is the same along a dimension (`IsBroadcastTree`)."""
        shape = self.shape(x)
        if isinstance(x, Constant) or not shape or shape[space] == 1:
            return True
        maker = self.producer.get(x)
        if maker is None or x in self.parts.cut:
            return False
        if maker.primitive is P.broadcast_in_dim_p:
            given, dimensions = self.shape(maker.inputs[0]), maker.params["broadcast_dimensions"]
            return space not in dimensions or given[dimensions.index(space)] == 1
        return maker.primitive in _ARITHMETIC and all(self.is_spread(one, space) for one in maker.inputs)

    def moved(self, user: Equation, value: int) -> bool:
        """Concatenations, padding, reversal and transposes."""
        cut, primitive = self.parts.cut[value], user.primitive
        if primitive is P.concatenate_p:
            fits = user.params["dimension"] not in (cut.batch, cut.space)
            fits = fits and all(isinstance(x, int) and self.parts.cut.get(x) == cut for x in user.inputs)
        elif primitive is P.pad_p:
            fits = all(not any(user.params["padding_config"][at]) for at in (cut.batch, cut.space))
        elif primitive is P.rev_p:
            fits = not {cut.batch, cut.space}.intersection(user.params["dimensions"])
        elif primitive is P.transpose_p:
            places = user.params["permutation"]
            batch, features, space = (places.index(at) for at in (cut.batch, cut.features, cut.space))
            cut = Cut(batch, features, space, cut.width)
            fits = True
        else:
            fits = False
        if fits:
            self.parts.cut[user.outputs[0]] = cut
        return fits

    def convolved(self, user: Equation, value: int) -> bool:
        """`PropagateOnConv`."""
        numbers, cut = user.params["dimension_numbers"], self.parts.cut[value]
        if user.inputs[0] != value or not self.is_suitable(user):
            return False
        if (numbers.lhs_spec[0], numbers.lhs_spec[-1]) != (cut.batch, cut.space):
            return False
        row = self.row(user)
        width = row.least_width()
        while width * PARTS + row.neighbours < row.padded or width < row.neighbours - row.low:
            width += row.stride
        read = width + row.neighbours
        if width > cut.width:
            self.parts.resized.add(user.outputs[0])
        elif width < cut.width:
            if cut.width % row.stride or row.dilation != 1:
                self.parts.resized.add(user.outputs[0])
            else:
                width, read = cut.width, cut.width + max(row.kernel - row.stride - width % row.stride, 0)
        self.convolve(user, row, width, read)
        return True

    def is_gradient(self, user: Equation, value: int) -> bool:
        """Whether a convolution is the gradient of weights, of whose operands one is in parts already
        (`PropagateOnBackpropFilterConv`)."""
        numbers, params = user.params["dimension_numbers"], user.params
        cut, side = self.parts.cut[value], user.inputs.index(value)
        if params["window_strides"][-1] != 1 or params["feature_group_count"] != 1 or params["lhs_dilation"][-1] != 1:
            return False
        spec = (numbers.lhs_spec, numbers.rhs_spec)[side]
        if (spec[1], spec[-1]) != (cut.batch, cut.space):
            return False
        if side == 0 and cut.width % params["rhs_dilation"][-1]:
            return False
        self.parts.late[user.outputs[0]] = 1 - side
        return True

    def pooled(self, user: Equation, value: int) -> bool:
        cut, params = self.parts.cut[value], user.params
        window, stride = (params[name][cut.space] for name in ("window_dimensions", "window_strides"))
        if not self.is_windowed(user, cut) or cut.width < window:
            return False
        width = cut.width
        if width % stride:
            self.parts.resized.add(user.outputs[0])
            shorter = width - width % stride
            width = shorter if shorter * PARTS >= self.shape(value)[cut.space] else shorter + stride
        neighbours = (cut.width - 1) // stride * stride + window - cut.width
        width = (width + max(neighbours, 0) - window) // stride + 1
        self.parts.cut[user.outputs[0]] = dataclasses.replace(cut, width=width)
        return True

    def is_windowed(self, user: Equation, cut: Cut) -> bool:
        """Whether windows lie in the row as parts of it may have them."""
        params = user.params
        low, high = params["padding"][cut.space]
        window = params["window_dimensions"]
        dilations = [params[name][cut.space] for name in ("base_dilation", "window_dilation") if name in params]
        return window[cut.batch] == 1 and low == 0 and high <= window[cut.space] and set(dilations) <= {1}

    def scattered(self, user: Equation) -> bool:
        source, operand = user.inputs
        image, pooled = (self.parts.cut.get(x) if isinstance(x, int) else None for x in (operand, source))
        if image is None or pooled is None or user.params["select_prim"] is not lax.ge_p:
            return False
        stride = user.params["window_strides"][image.space]
        fits = (image.batch, image.space) == (pooled.batch, pooled.space) and image.width % stride == 0
        padding = sum(user.params["padding"][image.space])
        if not fits or not self.is_windowed(user, image) or (image.width + padding) // stride != pooled.width:
            return False
        self.parts.cut[user.outputs[0]] = image
        return image.width >= user.params["window_dimensions"][image.space]
