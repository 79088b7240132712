"""The one bridge from jaxpr to graph: kinds, bytes and FLOPs of each equation, and the map from op ids to equations."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax.extend.core import primitives as P

from remat_opt.graph.cost import Rates, kernel_seconds, product_seconds
from remat_opt.graph.fusion import fuse
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.graph.tiles import padded_bytes
from remat_opt.rewrites.pooling import by_places
from remat_opt.rewrites.random_masks import masks_of_bits
from remat_opt.rewrites.splits import by_slices
from remat_opt.trace import compat
from remat_opt.trace.avals import bytes_of, dtype_name, is_on_device, item_bytes
from remat_opt.trace.flops import devices_of, flops_of
from remat_opt.trace.images import POOLS, images_of
from remat_opt.trace.inline import BodyFigures, Constant, Equation, Program, can_recompute, inline
from remat_opt.trace.platforms import GPUS
from remat_opt.trace.primitives import CONTRACTION, ELEMENTWISE, EXPENSIVE, PERMUTING, REDUCTION, WITH_BODIES
from remat_opt.trace.views import views_of
from remat_opt.trace.workspaces import workspace_of

_TIMED_BY_BODIES = WITH_BODIES | {compat.remat_p}
_UNKNOWN = BodyFigures()
_DEFAULT = jax.lax.Precision.DEFAULT


@dataclasses.dataclass(frozen=True, eq=False)
class Bridge:
    """A fused graph with the way back.

    Attributes:
        graph: the integers.
        program: the equations.
        equation_of: for each op the equation whose results it stores.
        on_demand: equations that no op stands for, by the value they make: constants, which depend on no input, and
            virtual values. They are evaluated afresh in each run that reads them.
        platform: of the compiler that it was built for, as of `build`.
        behind_barriers: values that are read behind a barrier, so that no compiler fuses or simplifies them away.
    """

    graph: Graph
    program: Program
    equation_of: tuple[int, ...]
    on_demand: dict[int, int]
    platform: str = ""
    behind_barriers: frozenset[int] = frozenset()


def build(
    program: Program,
    rates: Rates,
    donated: tuple[bool, ...] = (),
    *,
    platform: str = "",
    keep_scatters: bool = False,
    as_compiled: bool = False,
) -> Bridge:
    """Build the graph of a flat program as it is to be planned and written.

    Args:
        program: the flat jaxpr.
        rates: FLOP/s and bytes/s of the target.
        donated: for each input of the program whether its buffer may be reused.
        platform: "cpu", "cuda" or "tpu", of the compiler; some operations are written in another form for it.
        keep_scatters: the backward passes of pools are to be as they were given; by default they are of two parts.
        as_compiled: for predictions of a program that we do not write, see `fuse`.
    """
    if not keep_scatters:
        program = by_places(program, platform)
    if platform == "tpu":
        program = by_slices(program, _shares_tiles(program))
    masks = masks_of_bits(program) if platform == "cpu" else frozenset()
    views = views_of(program, platform)
    read = _read_ops(program, rates, platform, masks, views)
    equation_of, constant_equations = read.equation_of, program.constant
    unfused = Graph(
        sizes=tuple(bytes_of(aval) for aval in program.avals),
        ops=tuple(read.ops),
        inputs=(*program.inputs, *(value for value, _ in program.constants)),
        outputs=_outputs_of(program, constant_equations, views),
        aliases=tuple((given, views.get(x, x)) for given, x in aliases_of(program, donated, constant_equations)),
        constants=frozenset(constant_equations),
        host=frozenset(value for value, aval in enumerate(program.avals) if not is_on_device(aval)),
    )
    fusion = fuse(
        unfused,
        with_sums=True,
        overwrites=as_compiled or platform in GPUS,
        in_tuples=_convolved(program) if platform in GPUS else (),
        is_stored_if_shared=lambda op: as_compiled and (platform == "cpu" or (platform in GPUS and op.expensive)),
    )
    kernels = zip(fusion.graph.ops, (program.equations[equation_of[op]] for op in fusion.op_of), strict=True)
    timed = tuple(dataclasses.replace(op, seconds=_seconds(op, one, program, rates)) for op, one in kernels)
    fusion = dataclasses.replace(fusion, graph=dataclasses.replace(fusion.graph, ops=timed))
    if platform == "tpu":
        graph = _in_tiles(fusion.graph, program)
        fusion = dataclasses.replace(fusion, graph=_rounded(graph, program) if keep_scatters else graph)
    virtual = {value: equation_of[op] for value, op in fusion.virtual.items()}
    return Bridge(
        fusion.graph,
        program,
        tuple(equation_of[op] for op in fusion.op_of),
        {**constant_equations, **read.views, **virtual},
        platform,
        program.opaque | fusion.sums | masks,
    )


def _outputs_of(program: Program, constants: dict[int, int], views: dict[int, int]) -> tuple[int, ...]:
    """The results that are made, each once; of views what they are read as."""
    made = (x for x in program.outputs if not isinstance(x, Constant) and x not in constants)
    return tuple(dict.fromkeys(views.get(x, x) for x in made))


class _ReadOps(NamedTuple):
    """The ops of a program before any of them are fused.

    Attributes:
        ops: one for each equation that makes neither a constant nor a view.
        equation_of: for each op its equation.
        views: equations that make what is read as another value, see `views_of`, by the values they make.
    """

    ops: list[Op]
    equation_of: list[int]
    views: dict[int, int]


def _read_ops(program: Program, rates: Rates, platform: str, masks: frozenset[int], views: dict[int, int]) -> _ReadOps:
    """Read each equation as the platform's compiler does.

    Args:
        program: the flat jaxpr.
        rates: FLOP/s and bytes/s of the target.
        platform: as of `build`.
        masks: values that are stored, with all that they are made of fused into them.
        views: see `views_of`.
    """
    read = _ReadOps([], [], {})
    known = dict(program.bodies)
    bodies = Bodies(rates)
    for index, equation in enumerate(program.equations):
        if any(value in program.constant for value in equation.outputs):
            continue
        if views.keys() & equation.outputs:
            read.views.update(dict.fromkeys(equation.outputs, index))
            continue
        op = op_of(program, equation, rates)
        inputs = tuple(dict.fromkeys(views.get(value, value) for value in op.inputs)) if views else op.inputs
        inside, in_bodies = known.get(equation.outputs[0], _UNKNOWN) if equation.outputs else _UNKNOWN
        if inside is None:
            inside = workspace_of_loops(equation.primitive, equation.params, bodies)
        if in_bodies is None:
            in_bodies = seconds_of_bodies(equation.primitive, equation.params, bodies)
        space = max(workspace_of(equation, program, platform), inside)
        space -= _carried_in_place(equation, program, inputs)
        # A GPU's pool is a loop like others, into which its operand is fused.
        reduces = (platform in GPUS and equation.primitive in POOLS) or masks.intersection(equation.outputs)
        kind = Kind.REDUCTION if reduces else op.kind
        seconds = max(op.seconds, in_bodies)
        if (inputs, space, kind, seconds) != (op.inputs, op.workspace, op.kind, op.seconds):
            op = dataclasses.replace(op, inputs=inputs, workspace=space, kind=kind, seconds=seconds)
        read.ops.append(op)
        read.equation_of.append(index)
    return read


def op_of(program: Program, equation: Equation, rates: Rates) -> Op:
    inputs = tuple(value for value in equation.reads if value not in program.constant)
    flops = flops_of(equation, program)
    kind = kind_of(equation.primitive)
    dtype = dtype_name(program.avals[equation.outputs[0]].dtype) if equation.outputs else "float32"
    arithmetic = 0.0
    if kind is Kind.CONTRACTION:
        arithmetic = product_seconds(flops, program.avals[equation.outputs[0]].size, dtype, rates)
    elif kind is not Kind.ELEMENTWISE and _has_product(equation.params):
        arithmetic = flops / rates.matrix_rate(dtype)
    return Op(
        inputs=inputs,
        outputs=equation.outputs,
        kind=kind,
        flops=flops,
        seconds=arithmetic,
        repeatable=can_recompute(program, equation),
        name=equation.primitive.name,
        expensive=equation.primitive in EXPENSIVE,
        same_place=_read_at_the_same_place(equation, program, inputs) if kind is Kind.ELEMENTWISE else (),
    )


def _seconds(kernel: Op, equation: Equation, program: Program, rates: Rates) -> float:
    """Of a kernel, with all that is fused into it.

    Args:
        kernel: its op, whose seconds are those of its own arithmetic alone, or of a loop's bodies.
        equation: whose results it stores.
        program: the flat jaxpr.
        rates: of the target.
    """
    if rates.counts_flops:
        return kernel.flops / rates.flops["float32"]
    is_copy = not all(is_on_device(program.aval_of(atom)) for atom in (*equation.inputs, *equation.outputs))
    if equation.primitive is compat.barrier_p or (is_copy and not compat.jaxprs_in(equation.params)):
        return 0.0
    moved = kernel.traffic
    if equation.primitive is P.dynamic_update_slice_p:  # in place
        moved = 2 * bytes_of(program.aval_of(equation.inputs[1]))
    elif equation.primitive is P.gather_p:  # of its operand no more than it writes
        moved = 2 * bytes_of(program.avals[equation.outputs[0]])
    return kernel_seconds(kernel.seconds, moved, rates)


def _convolved(program: Program) -> frozenset[int]:
    """The results of convolutions."""
    found = (one.outputs for one in program.equations if one.primitive is P.conv_general_dilated_p)
    return frozenset(itertools.chain.from_iterable(found))


def _read_at_the_same_place(equation: Equation, program: Program, operands: tuple[int, ...]) -> tuple[int, ...]:
    """Operands of an elementwise equation that have the number that it needs where it writes its result."""
    if equation.primitive in PERMUTING:
        return ()
    size = program.avals[equation.outputs[0]].size
    return tuple(value for value in operands if program.avals[value].size == size)


def _carried_in_place(equation: Equation, program: Program, buffers: Collection[int]) -> int:
    """Bytes of what a loop carries in the buffers that it begins with: those that nothing else reads."""
    if equation.primitive not in (P.scan_p, P.while_p):
        return 0
    first, count = compat.loop_counts(equation.params)
    carries = [x for x in equation.inputs[first : first + count] if isinstance(x, int)]
    others = {*program.inputs} | program.returned
    return sum(
        bytes_of(program.avals[value])
        for value in carries
        if value in buffers and value not in others and len(program.readers[value]) == carries.count(value) == 1
    )


class Bodies:
    """Bodies of loops and branches in the order in which they are written, each read once.

    Args:
        rates: FLOP/s and bytes/s of the target.
    """

    def __init__(self, rates: Rates):
        self.rates = rates
        self.known: dict[int, tuple[Any, Bridge]] = {}  # by id, with the jaxpr, which keeps the id its own

    def read(self, primitive: Any, jaxpr: Any) -> Bridge:
        if id(jaxpr) not in self.known:
            program = inline(jaxpr, keep_checkpoints=True)
            reusing = primitive is compat.shard_map_p  # results may take the place of inputs
            self.known[id(jaxpr)] = jaxpr, build(program, self.rates, (reusing,) * len(program.inputs))
        return self.known[id(jaxpr)][1]

    def graph(self, primitive: Any, jaxpr: Any) -> Graph:
        return self.read(primitive, jaxpr).graph


def workspace_of_loops(primitive: Any, params: dict[str, Any], bodies: Bodies) -> int:
    """The most temporary bytes that a step of a loop, a branch or all devices need, beside operands and results.

    Of a region that holds loops it is that of the loop that needs most.
    """
    if primitive in ELEMENTWISE:  # most are, and none of these has a program of its own
        return 0
    jaxprs = compat.jaxprs_in(params)
    if primitive in WITH_BODIES:
        times = devices_of(params) if primitive is compat.shard_map_p else 1
        return times * max(peak_of(bodies.graph(primitive, jaxpr)) for jaxpr in jaxprs)
    inner = [equation for jaxpr in jaxprs for equation in compat.bare_jaxpr(jaxpr).eqns]
    return max((workspace_of_loops(equation.primitive, equation.params, bodies) for equation in inner), default=0)


def seconds_of_bodies(primitive: Any, params: dict[str, Any], bodies: Bodies) -> float:
    """Seconds of a loop by the kernels of its body, each as often as it runs; 0 for what has no body.

    A loop of unknown length counts once, as its FLOPs do, and of branches the longest.
    """
    if primitive not in _TIMED_BY_BODIES:
        return 0.0
    seconds = [bodies.graph(primitive, jaxpr).seconds for jaxpr in compat.jaxprs_in(params)]
    if primitive is P.cond_p:
        return max(seconds)
    times = devices_of(params) if primitive is compat.shard_map_p else params.get("length", 1)
    return times * sum(seconds)


def peak_as_written(program: Program, rates: Rates) -> int:
    """The peak in bytes of a program in its own order."""
    return peak_of(build(program, rates).graph)


def _has_product(params: dict[str, Any]) -> bool:
    """Whether an equation runs products inside, as loops do."""
    return any(
        equation.primitive in CONTRACTION or _has_product(equation.params)
        for jaxpr in compat.jaxprs_in(params)
        for equation in compat.bare_jaxpr(jaxpr).eqns
    )


def aliases_of(program: Program, donated: tuple[bool, ...], constants: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Pair donated inputs with outputs of equal type, in order, as the lowering of `jax.jit` does."""
    free: dict[Any, list[int]] = {}
    for value, given in zip(program.inputs, donated, strict=False):
        if given:
            aval = program.avals[value]
            free.setdefault((aval.shape, aval.dtype), []).append(value)
    pairs = []
    for output in program.outputs:
        if isinstance(output, Constant):
            continue
        aval = program.avals[output]
        candidates = free.get((aval.shape, aval.dtype))
        if candidates:
            given = candidates.pop(0)
            if output not in constants and given != output:
                pairs.append((given, output))
    return tuple(dict.fromkeys(pairs))


def kind_of(primitive: Any) -> Kind:
    """How compilers treat a primitive; what is unknown is opaque."""
    if primitive in ELEMENTWISE:
        return Kind.ELEMENTWISE
    if primitive in REDUCTION:
        return Kind.REDUCTION
    if primitive in CONTRACTION:
        return Kind.CONTRACTION
    return Kind.OPAQUE


def _in_tiles(graph: Graph, program: Program) -> Graph:
    """The graph with the sizes of images as a TPU stores them: of few features or a small batch, up to twice as many
    bytes. That decides where the peak is; all else is padded by little."""
    images, sizes = images_of(program), list(graph.sizes)
    for value in images:
        aval = program.avals[value]
        if sizes[value]:
            sizes[value] = padded_bytes(aval.shape, item_bytes(aval.dtype), is_image=True)
    return dataclasses.replace(graph, sizes=tuple(sizes))


def _rounded(graph: Graph, program: Program) -> Graph:
    """The graph with half the bytes of what products and convolutions alone read: a TPU multiplies in bfloat16, and
    XLA's `bfloat16_propagation` stores it so. (Of what we write barriers read it, too.)"""
    sizes, free = list(graph.sizes), {*graph.inputs, *graph.outputs}
    rounding = (None, _DEFAULT, (_DEFAULT, _DEFAULT))
    precise = {x for e in program.equations if e.params.get("precision") not in rounding for x in e.inputs}
    for value, users in enumerate(graph.users):
        is_operand = users and all(graph.ops[user].kind is Kind.CONTRACTION for user in users)
        if is_operand and value not in free and value not in precise and program.avals[value].dtype == "float32":
            sizes[value] //= 2
    return dataclasses.replace(graph, sizes=tuple(sizes))


def _shares_tiles(program: Program) -> Callable[[Equation], bool]:
    """Of which splits each piece takes as many bytes as the whole, as a TPU stores images: each half of 128 features
    fills as many lanes. Who reads a piece then reads it from the whole."""
    images = images_of(program)

    def bytes_in_tiles(value: int | Constant) -> int:
        aval = program.aval_of(value)
        return padded_bytes(aval.shape, item_bytes(aval.dtype), is_image=True)

    def shares(equation: Equation) -> bool:
        if equation.primitive is not compat.split_p or not images.issuperset(equation.inputs):
            return False
        (whole,) = map(bytes_in_tiles, equation.inputs)
        return all(bytes_in_tiles(piece) >= whole for piece in equation.outputs)

    return shares
