"""A flat program as a platform's compiler runs it: what it makes of each equation, what it stores, in which order.

The planner's own graph (`build.py`) is of a program that is still to be written: it has the order of a schedule, and
the freedom of a search. Here a program is given as it is lowered, plain or written by us; the compiler reads it, knows
dependencies but no order, and its rules decide what is live when. Each rule below is one of an operation or a backend.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.compilers import tpu
from remat_opt.compilers.cpu_reader import CpuReader
from remat_opt.compilers.gpu_fusion import fuse_by_cost
from remat_opt.compilers.gpu_multiples import with_multiples_made_again
from remat_opt.compilers.gpu_reader import GpuReader
from remat_opt.compilers.gpu_siblings import beside_reductions, join_siblings
from remat_opt.compilers.gpu_vectors import with_vectors_by_loops
from remat_opt.compilers.packing import buffers_of, lying_in_results, pack
from remat_opt.compilers.reader import VIEW, Reader
from remat_opt.compilers.tpu_beside import with_pieces_beside, with_work_beside
from remat_opt.compilers.tpu_clock import with_seconds
from remat_opt.compilers.tpu_fusion import (
    widened,
    with_numbers_apart,
    with_pads_in_readers,
    with_results_computed,
    with_widened_beside,
)
from remat_opt.compilers.tpu_loops import with_loops_joined
from remat_opt.compilers.tpu_ordering import tpu_order
from remat_opt.compilers.tpu_reader import TpuReader
from remat_opt.compilers.tpu_slices import before_products
from remat_opt.compilers.tpu_spread import with_spread_in_loops
from remat_opt.compilers.tpu_tables import with_small_tables
from remat_opt.compilers.tpu_tiles import in_tiles
from remat_opt.compilers.tpu_transposes import with_transposes_undone
from remat_opt.compilers.tpu_updates import with_results_copied
from remat_opt.compilers.tpu_windows import with_windowed_maxima
from remat_opt.graph import ordering
from remat_opt.graph.cost import Rates
from remat_opt.graph.fusion import fuse, held_by
from remat_opt.graph.fusion_loops import fuse_loops
from remat_opt.graph.graph import Graph, Kind, Op
from remat_opt.graph.liveness import peak_of
from remat_opt.graph.ordering import runs_before
from remat_opt.program import compat
from remat_opt.program.images import images_of
from remat_opt.program.inline import Program, inline
from remat_opt.program.one_hot import by_comparison
from remat_opt.program.platforms import GPUS
from remat_opt.program.splits import by_slices


def compiled(
    program: Program,
    rates: Rates,
    donated: tuple[bool, ...] = (),
    *,
    platform: str = "",
    saving_memory: bool = False,
    loop: tuple[int, int] | None = None,
    is_step: bool = True,
) -> Graph:
    """The kernels and buffers that a platform's compiler makes of a program, in the order in which it runs them.

    Args:
        program: as it is lowered.
        rates: FLOP/s and bytes/s of the target.
        donated: for each input of the program whether its buffer may be reused.
        platform: "cpu", "cuda" or "tpu".
        saving_memory: whether the compiler is asked to order kernels for little memory, as we ask the CPU's.
        loop: of a loop's body how many constants it is given first, and how much it carries behind these.
        is_step: whether it is all of a step, and no loop's body or branch.
    """
    bodies = _Bodies(rates, platform, saving_memory)
    if platform in GPUS:
        program = with_multiples_made_again(with_vectors_by_loops(program))
    program = by_slices(program)
    if platform == "tpu":
        program = with_windowed_maxima(with_spread_in_loops(program))
        program = with_transposes_undone(before_products(by_comparison(program)))
    reader = _reader_of(program, rates, platform, bodies, loop)
    unfused = reader.read(donated)
    if platform not in GPUS:
        unfused = with_copies_of_donated(unfused, are_ordered=platform == "tpu")
    graph = _kernels(reader, unfused)

    def sharing(one: Graph) -> Graph:
        return sharing_places(one, platform)

    is_tpu = isinstance(reader, TpuReader)
    order = tpu_order(graph, sharing) if is_tpu else ordering.order_of(graph, platform, saving_memory, sharing)
    ordered = ordering.in_order(graph, order)
    if platform == "cpu" or platform in GPUS:
        ordered = without_what_lies_in_results(ordered, platform)
    if isinstance(reader, TpuReader):
        numbers = frozenset(value for value, aval in enumerate(reader.program.avals) if aval.size == 1)
        timed = with_seconds(ordered, rates)
        kept = reader.kept_between_steps() if is_step else frozenset()
        ordered = tpu.on_chip(timed, numbers, rates=rates, is_body=loop is not None, rounded=reader.rounded, kept=kept)
    return sharing_places(ordered, platform)


class _Bodies:
    """What the compiler makes of the bodies of a program's loops, of branches, and of what each device runs.

    Attributes:
        buffers: by the id of its jaxpr, a body's buffers, as `Op.inside`.
        tables: in the same way the bytes of its kernels' tables on a TPU.
        images: in the same way which of its results are images, by their places.
    """

    def __init__(self, rates: Rates, platform: str, saving_memory: bool):
        self.rates = rates
        self.platform = platform
        self.saving_memory = saving_memory
        self.buffers: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.tables: dict[int, int] = {}
        self.images: dict[int, frozenset[int]] = {}
        self._graphs: dict[int, Graph] = {}

    def peak_of(self, primitive: Any, params: dict[str, Any], jaxpr: Any) -> int:
        return peak_of(self._graph_of(primitive, params, jaxpr))

    def seconds_of(self, primitive: Any, params: dict[str, Any], jaxpr: Any) -> float:
        return self._graph_of(primitive, params, jaxpr).seconds

    def _graph_of(self, primitive: Any, params: dict[str, Any], jaxpr: Any) -> Graph:
        key = id(jaxpr)
        if key in self._graphs:
            return self._graphs[key]
        body = inline(jaxpr, with_barriers=True, keep_names=False)
        graph = compiled(
            body,
            self.rates,
            reused_by_results(primitive, params, len(body.inputs)),
            platform=self.platform,
            saving_memory=self.saving_memory,
            loop=compat.scan_counts(params) if primitive is P.scan_p else None,
            is_step=False,
        )
        self._graphs[key], self.tables[key] = tpu.without_tables(graph)
        if self.platform == "tpu":
            images = images_of(body).difference(body.inputs)
            self.images[key] = frozenset(at for at, result in enumerate(body.outputs) if result in images)
        if self.platform != "cpu":
            self.buffers[key] = buffers_of(self._graphs[key], shared_places(self._graphs[key], self.platform))
        return self._graphs[key]


def _reader_of(program: Program, rates: Rates, platform: str, bodies: _Bodies, loop: tuple[int, int] | None) -> Reader:
    if platform in GPUS:
        gpu = GpuReader(program, rates, platform, bodies.peak_of, loop, bodies.buffers)
        gpu.makes_zeros_at_once = not bodies.saving_memory  # what is written makes most of them late, behind barriers
        return gpu
    if platform != "tpu":
        return CpuReader(program, rates, platform, bodies.peak_of)
    reader = TpuReader(program, rates, platform, bodies.peak_of)
    reader.loop, reader.bodies, reader.tables = loop, bodies.buffers, bodies.tables
    reader.images_of_bodies = bodies.images
    reader.seconds_of_body = bodies.seconds_of
    return reader


def _kernels(reader: Reader, unfused: Graph) -> Graph:
    """A program's kernels, in no order yet."""
    avals = reader.program.avals
    if reader.platform == "cpu":
        return without_mere_views(fuse_loops(unfused, _elements_of(reader, unfused)).graph)
    if isinstance(reader, GpuReader):
        fused = join_siblings(fuse_by_cost(unfused, reader.work, reader.rates.bandwidth).graph)
        return beside_reductions(fused, _elements_of(reader, unfused), reader.reductions())
    if isinstance(reader, TpuReader):
        ops = unfused = with_pads_in_readers(unfused)
        elements = [aval.size for aval in avals] + [0] * (len(unfused.sizes) - len(avals))
        unfused = with_numbers_apart(with_results_computed(unfused, elements), elements)
        unfused = in_tiles(reader, with_pieces_beside(unfused, elements), narrow=False)
        fused = fuse(unfused, by_kernels=True, cut_from_buffers=True, copied=widened(unfused), moving=tpu.MOVING).graph
        numbers = frozenset(value for value, count in enumerate(elements) if count == 1)
        fused = with_small_tables(with_widened_beside(fused), reader.accumulated(), numbers, tpu.PAGE)
        fused = with_loops_joined(fused, reader.shapes_of_loops(), elements, reader.accumulated())
        return with_results_copied(in_tiles(reader, with_work_beside(fused, elements)), ops)
    return fuse(unfused, by_kernels=True).graph


def _elements_of(reader: Reader, graph: Graph) -> list[int]:
    """How many numbers each value is."""
    elements = [getattr(aval, "size", 0) for aval in reader.program.avals]
    return elements + [size // 4 for size in graph.sizes[len(elements) :]]  # the compiler's own


def reused_by_results(primitive: Any, params: dict[str, Any], inputs: int) -> tuple[bool, ...]:
    """For each input of a body whether a result takes its place: what a loop carries, and all that a device has of a
    mapped function."""
    if primitive is P.while_p:
        _, carries = compat.loop_counts(params)
        return tuple(at >= inputs - carries for at in range(inputs))
    if primitive is P.scan_p:
        constants, carries = compat.scan_counts(params)
        return tuple(constants <= at < constants + carries for at in range(inputs))
    return (primitive is compat.shard_map_p,) * inputs


def allocated_by(graph: Graph, platform: str, *, gaps_twice: bool = False) -> int:
    """Bytes of temporary memory that a platform's compiler reports for what `compiled` gives.

    Args:
        graph: kernels in their order.
        platform: of the target.
        gaps_twice: whether the compiler reports its allocation and what lies idle in it (`targets/figures.py`).
    """
    shared = shared_places(graph, platform)
    allocation = pack(graph, shared, as_they_come=platform == "tpu")
    return allocation.size + gaps_twice * allocation.gaps


def _parts_of_tuples(graph: Graph) -> frozenset[int]:
    """Results of convolutions, which a GPU's library returns together with its scratch memory."""
    return frozenset(value for op in graph.ops if op.name == P.conv_general_dilated_p.name for value in op.outputs)


def shared_places(graph: Graph, platform: str = "") -> dict[int, int]:
    """For what elementwise kernels write over an operand of their result's size that nobody reads after them: that
    operand.

    Args:
        graph: kernels in their order.
        platform: whose compiler. XLA shares places with direct operands only (`heap_simulator.cc`). What a barrier
            returns a kernel does not read from there, but from an instruction that takes a tuple apart; on a GPU so
            does what reads a convolution's result, and on a TPU what reads one of several results (`Op.in_tuple`). The
            loops of CPU and TPU write over what they read at the same places alone
            (`HloDataflowAnalysis::CanShareOperandBufferWithUser`), and the CPU's not over what is gathered: that has a
            dimension of one more (`gather_simplifier.cc`), so that they mostly read it as a view.
    """
    last = {value: index for index, op in enumerate(graph.ops) for value in op.inputs}
    kept = {*graph.inputs, *graph.outputs, *(_parts_of_tuples(graph) if platform in GPUS else ())}
    read_only = kept.union(value for op in graph.ops if op.in_tuple for value in op.outputs)
    gathered = {value for op in graph.ops if op.name == P.gather_p.name for value in op.outputs}
    found: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        # What is padded is made of something smaller, and read at other places. (A TPU's products pad what they read.)
        is_pad = op.name == P.pad_p.name and platform != "tpu"
        is_by_elements = (op.kind is Kind.ELEMENTWISE and not op.of_views and not is_pad) or bool(op.written_over)
        if not is_by_elements or op.changed_later:
            continue
        behind = held_by(graph, op) if platform == "cpu" or platform in GPUS else ()
        at_other_places = op.moved_of if platform in ("cpu", "tpu") else op.rows_of
        taken = {*behind, *at_other_places, *(gathered if platform == "cpu" else ())}
        # By ids of before arguments were copied: what is no operand any more stands for nothing.
        read = [v for v in op.inputs if v in op.written_over] if op.written_over else op.inputs
        free = [v for v in read if last[v] == index and v not in read_only and v not in taken]
        for value in op.outputs:
            fitting = [operand for operand in free if graph.sizes[operand] == graph.sizes[value]]
            if fitting and value not in kept:
                found[value] = fitting[0]
                free.remove(fitting[0])
    return found


def sharing_places(graph: Graph, platform: str = "") -> Graph:
    """A graph whose kernels write over operands (`shared_places`, with the same arguments).

    Such a result is counted as a buffer of its own; that of the operand is taken off while the kernel runs.
    """
    shared, ops = shared_places(graph, platform), list(graph.ops)
    for index, op in enumerate(ops):
        taken = sum(graph.sizes[value] for value in op.outputs if value in shared)
        if taken:
            ops[index] = op.but(workspace=op.workspace - taken)
    return dataclasses.replace(graph, ops=tuple(ops))


def without_what_lies_in_results(graph: Graph, platform: str) -> Graph:
    """A graph of kernels in their order in which the places of results are no memory, whatever lies there."""
    inside, ops = lying_in_results(graph, shared_places(graph, platform))
    sizes = tuple(0 if value in inside else size for value, size in enumerate(graph.sizes))
    return dataclasses.replace(graph, sizes=sizes, ops=ops)


def without_mere_views(graph: Graph) -> Graph:
    """A graph of kernels without those that only give a buffer another shape: who reads them reads the buffer."""
    instead: dict[int, int] = {}
    ops = []
    for op in graph.ops:
        arrays = [value for value in op.inputs if graph.sizes[value]]
        if op.name == VIEW and not op.flops and [graph.sizes[one] for one in arrays] == [graph.sizes[op.outputs[0]]]:
            instead[op.outputs[0]] = instead.get(arrays[0], arrays[0])
        else:
            inputs = tuple(dict.fromkeys(instead.get(value, value) for value in op.inputs))
            ops.append(op if inputs == op.inputs else op.but(inputs=inputs))
    return dataclasses.replace(graph, ops=tuple(ops)) if instead else graph


def with_copies_of_donated(graph: Graph, *, are_ordered: bool = False) -> Graph:
    """A graph in which no update overwrites a donated argument that is still to be read.

    Compilers decide by dependencies alone, before they have an order: where an update does not depend on some reader of
    the argument whose place it takes, all readers get a copy, so that the argument's place is free until the update.

    Args:
        graph: ops in an order in which they can run.
        are_ordered: whether readers run before the update wherever they can, so that only those get a copy that need
            what it makes: so on a TPU (`tpu_ordering.py`).
    """
    before = runs_before(graph)
    sizes, ops = list(graph.sizes), list(graph.ops)
    copies: dict[int, list[Op]] = {}
    for given, output in graph.aliases:
        update, users = graph.producer[output], graph.users[given]
        if update < 0:
            continue
        if are_ordered:
            readers = [user for user in users if before[user] >> update & 1]
        else:
            is_loose = any(user != update and not before[update] >> user & 1 for user in users)
            readers = users if is_loose else []
        if not readers:
            continue
        copy = len(sizes)
        sizes.append(sizes[given])
        first = update if are_ordered else readers[0]
        copies.setdefault(first, []).append(Op((given,), (copy,), name="copy"))
        for user in readers:
            inputs = tuple(copy if value == given else value for value in ops[user].inputs)
            ops[user] = dataclasses.replace(ops[user], inputs=inputs)
    if not copies:
        return graph
    ordered = [one for index, op in enumerate(ops) for one in (*copies.get(index, ()), op)]
    return dataclasses.replace(graph, sizes=tuple(sizes), ops=tuple(ordered))
