"""`Plan`: the decision for one program, which can be printed, saved, loaded, edited and reused."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remat_opt.graph.derive import Choice
from remat_opt.graph.graph import Graph
from remat_opt.graph.schedule import Run, Schedule, Transfer
from remat_opt.graph.transfers import check_transfers
from remat_opt.loops.choice import Chunks, LoopChoice
from remat_opt.loops.options import MOST_KINDS
from remat_opt.loops.pairs import Pair
from remat_opt.planner import plan_checks
from remat_opt.planner.plan_checks import Ranges
from remat_opt.targets.figures import Figures
from remat_opt.units import format_bytes, format_count

SCHEMA = 3
# Fields of a plan that its text has by the same name.
_WRITTEN_AS_THEY_ARE = ("fingerprint", "inputs", "equations", "target", "solver", "budget", "saved", "saved_digest")
_WRITTEN_AS_THEY_ARE += ("note", "loop_bodies", "inside_loops")
# What its text has only where it is true: plans from before there was such a thing do not say anything of it.
_MARKS = {"gathers_once": "gathers_once", "rewritten": "rewritten", "in_our_order": "reordered"}


class PlanError(ValueError):
    """A plan cannot be read, or does not fit the program it is used on."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The models' figures for a plan; nothing is compiled for them.

    Attributes:
        plain_peak_bytes: peak of temporary memory of the original step.
        peak_bytes: the same for the planned step.
        saved_bytes: bytes of all saved tensors.
        flops: FLOPs of the original step.
        extra_flops: FLOPs that are recomputed.
        seconds: estimated time of the original step on the target.
        extra_seconds: estimated time of the recomputation, and of waiting for copies to and from the host.
        host_bytes: of the host's memory, for values that are there for a time.
        stall_seconds: estimated time of waiting for copies, a part of `extra_seconds`.
    """

    plain_peak_bytes: int
    peak_bytes: int
    saved_bytes: int
    flops: float
    extra_flops: float
    seconds: float
    extra_seconds: float
    host_bytes: int = 0
    stall_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timing:
    """A plan that ran when the step was tuned.

    Attributes:
        what: the plan in words.
        seconds: of one run on the device.
        physical_peak_bytes: the compiler's figure, of one device.
        is_taken: whether it is the one that was decided for.
    """

    what: str
    seconds: float
    physical_peak_bytes: int
    is_taken: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PackedRun:
    """A `Run` with its operations as ranges: a plan from a file says nothing that is listed before it is checked."""

    ranges: Ranges
    recomputed: bool


def pack(schedule: Schedule) -> tuple[PackedRun, ...]:
    """A schedule's runs with their operations as ranges; `Plan.schedule` is the inverse."""
    return tuple(PackedRun(_to_ranges(run.ops), run.recomputed) for run in schedule.runs)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decision for one program.

    Attributes:
        fingerprint: SHA-256 of the inlined program; a plan is refused for any other.
        inputs: types of the program's inputs, to tell where a plan does not fit.
        equations: how many equations the inlined program has.
        target: name of the device that was planned for.
        solver: name of the search.
        budget: the budget as it was asked for; None for the least memory.
        saved: names of the saved tensors. Only this may be edited by hand; the schedule is then derived again.
        choice: the search's decision by ids: the saved values, the cuts and the forward/backward boundaries.
        runs: the order of all ops, with repeats, as ranges; `schedule` lists them.
        predicted: the models' figures.
        measured: the compiler's figures of the planned step, where it was compiled.
        plain_measured: the compiler's figures of the original step, where it was compiled.
        versions: versions of remat_opt, jax and jaxlib that planned.
        note: why the plan is as it is, in a sentence, where there is something to say.
        saved_digest: of the saved set that the schedule was made for.
        loops: for pairs of forward and backward loops, by position, how they are written; the schedule is of the
            program with its loops written so.
        loop_bodies: how many bodies of loops were rewritten.
        inside_loops: the share of what lies between their least and their plain peak that they may need; None where
            none was rewritten.
        gathers_once: for a sharded step: recomputation reads the weights that were gathered before, instead of
            gathering them again.
        rewritten: whether some operations differ from those of the original step. Then the step is emitted even if
            nothing is recomputed.
        reordered: nothing is recomputed and no operation differs, but the step is emitted in our order, which alone
            saves memory.
        chunks: into how many the batch is split; 0 where it is not.
        transfers: values that are in the host's memory for a time, by their places in the schedule.
        timings: the plans that ran when the step was tuned, this one among them; none where it was not.
    """

    fingerprint: str
    inputs: tuple[str, ...]
    equations: int
    target: str
    solver: str
    budget: int | float | str | None
    saved: tuple[str, ...]
    choice: Choice
    runs: tuple[PackedRun, ...]
    predicted: Prediction
    measured: Figures | None = None
    plain_measured: Figures | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    note: str = ""
    saved_digest: str = ""
    loops: tuple[tuple[int, LoopChoice], ...] = ()
    loop_bodies: int = 0
    inside_loops: float | None = None
    gathers_once: bool = False
    rewritten: bool = False
    reordered: bool = False
    chunks: int = 0
    transfers: tuple[Transfer, ...] = ()
    timings: tuple[Timing, ...] = ()

    def __repr__(self) -> str:
        """What is saved and what it costs, in place of every type and operation, which `to_json` has."""
        found, segments = self.predicted, sum(run.recomputed for run in self.runs)
        budget = "no budget" if self.budget is None else f"budget {self.budget!r}"
        does = f"{len(self.saved)} tensors saved, {segments} segments recomputed"
        does += f", {format_count(self.loop_bodies, 'loop')} rewritten inside" if self.loop_bodies else ""
        does = "nothing is changed" if self.is_plain else does
        flops = f"{100 * found.extra_flops / max(found.flops, 1):+.1f} % FLOPs"
        size = f"{format_bytes(found.plain_peak_bytes)} → {format_bytes(found.peak_bytes)} predicted"
        if self.measured is not None:
            before = "" if self.plain_measured is None else f"{format_bytes(self.plain_measured.temp_bytes)} → "
            size = f"{before}{format_bytes(self.measured.temp_bytes)} compiled"
        lines = [f"Plan for {self.target}, {budget}: {does}, {flops}", f"temporary memory: {size}"]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    @property
    def is_plain(self) -> bool:
        """Whether nothing is changed: the step runs unchanged."""
        changes = self.transfers or any(run.recomputed for run in self.runs)
        return not (changes or self.loops or self.loop_bodies or self.rewritten or self.reordered)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The order of all ops, with repeats. Of a plan that somebody else wrote ask `schedule_for`."""
        runs = tuple(Run(_from_ranges(run.ranges), run.recomputed) for run in self.runs)
        return Schedule(runs, self.transfers)

    def schedule_for(self, graph: Graph) -> Schedule:
        """The schedule, after it was compared with the program that it is to be used on.

        Args:
            graph: the program, with its loops written as the plan says.

        Raises:
            ValueError: it does not run each operation once, runs one again that may run only once, or has positions
                that the program does not have.
        """
        count = plan_checks.check_runs(((run.ranges, run.recomputed) for run in self.runs), len(graph.ops))
        points = self.choice.boundaries
        for at in (*points, *self.choice.cuts):
            plan_checks.expect(0 <= at <= count, "choice", f"positions from 0 to {count}", at)
        if len({*points}) * count > plan_checks.most_runs(count):
            raise ValueError(f"choice, expected fewer turning points, found {len(points)}")
        schedule = self.schedule
        once = {op for op in range(count) if not graph.ops[op].repeatable}
        if not once.isdisjoint(schedule.recomputed):
            raise ValueError(f"schedule, which runs operation {min(once.intersection(schedule.recomputed))} again")
        in_order = [op for run in schedule.runs if not run.recomputed for op in run.ops if op in once]
        if in_order != sorted(in_order):
            raise ValueError("schedule, which changes the order of operations that may run only once")
        check_transfers(graph, schedule)
        return schedule

    @property
    def edited(self) -> bool:
        """Whether the saved set was edited by hand; schedule and figures are then those of before."""
        return digest(self.saved) != self.saved_digest

    def to_json(self) -> str:
        """The plan as text; `from_json` gives it back."""
        document = {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in _WRITTEN_AS_THEY_ARE},
            "versions": dict(self.versions),
            "choice": {
                "saved": self.choice.saved,
                "turning_points": self.choice.boundaries,
                "cuts": self.choice.cuts,
            },
            "schedule": [{"recomputed": run.recomputed, "ops": run.ranges} for run in self.runs],
            "predicted": dataclasses.asdict(self.predicted),
            "measured": self.measured and self.measured.as_json(),
            "plain_measured": self.plain_measured and self.plain_measured.as_json(),
            "loops": [{"pair": at, **dataclasses.asdict(loop)} for at, loop in self.loops],
            **{name: True for name, field in _MARKS.items() if getattr(self, field)},
            **({"chunks": self.chunks} if self.chunks else {}),
            **{
                name: [dataclasses.asdict(one) for one in records]
                for name, records in (("transfers", self.transfers), ("timings", self.timings))
                if records
            },
        }
        document["schedule_digest"] = _digest_of_schedule(document)
        return json.dumps(document, indent=1, default=sorted)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises:
            PlanError: the text is no plan, is cut short, or has another schema.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:  # of JSON, of numbers with too many digits, of endless nesting
            raise PlanError(
                "expected the JSON text of a plan, as plan.save(path) writes it; it cannot be read: "
                f"{error}. Plan again with step.plan(*args).save(path)"
            ) from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise PlanError(
                f"expected a plan of schema {SCHEMA}, found {found!r}; plan again with step.plan(*args).save(path)"
            )
        try:
            return cls._from_document(document)
        except ValueError as error:
            raise PlanError(
                f"expected a whole plan, as plan.save(path) writes it; it is damaged at {error}. "
                "Plan again with step.plan(*args).save(path)"
            ) from error

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Plan:
        plan_checks.document(SCHEMA, Prediction)("", document)
        if _digest_of_schedule(document) != document["schedule_digest"]:
            raise ValueError("choice or schedule, which were edited; only the names under saved may be")
        runs = tuple(
            PackedRun(tuple((first, count) for first, count in run["ops"]), run["recomputed"])
            for run in document["schedule"]
        )
        plan_checks.check_runs((run.ranges, run.recomputed) for run in runs)
        choice = document["choice"]
        values: dict[str, Any] = {name: document[name] for name in (*_WRITTEN_AS_THEY_ARE, "versions")}
        values |= {"inputs": tuple(document["inputs"]), "saved": tuple(document["saved"])}
        values |= {field: name in document for name, field in _MARKS.items()}
        values |= {"chunks": document.get("chunks", 0)}
        values |= {"transfers": tuple(Transfer(**one) for one in document.get("transfers", ()))}
        values |= {"timings": tuple(Timing(**one) for one in document.get("timings", ()))}
        return cls(
            **values,
            choice=Choice(frozenset(choice["saved"]), tuple(choice["turning_points"]), tuple(choice["cuts"])),
            runs=runs,
            predicted=Prediction(**document["predicted"]),
            measured=_figures(document["measured"]),
            plain_measured=_figures(document["plain_measured"]),
            loops=tuple((loop["pair"], _loop_choice(loop)) for loop in document["loops"]),
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file; errors as `from_json`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanError(f"expected the JSON text of a plan in {path}, found bytes that are no UTF-8") from error
        return cls.from_json(text)


def check_fit(plan: Plan, fingerprint: str, inputs: tuple[str, ...], equations: int) -> None:
    """Raise PlanError, naming what differs, where a plan is for another program than the one described."""
    if plan.fingerprint == fingerprint:
        return
    if inputs != plan.inputs:
        if len(inputs) != len(plan.inputs):
            what = f"it was made for {len(plan.inputs)} input arrays, this program has {len(inputs)}"
        else:
            index = next(i for i in range(len(inputs)) if inputs[i] != plan.inputs[i])
            what = f"its input {index} is {plan.inputs[index]}, here it is {inputs[index]}"
    elif plan.equations != equations:
        what = f"it has {plan.equations} equations, this program {equations}"
    else:
        what = "an operation or one of its parameters differs"
    raise PlanError(
        f"expected a plan for this program, got one for another: {what}. Plan again with step.plan(*args).save(path)"
    )


def check_loops(plan: Plan, pairs: Sequence[Pair]) -> None:
    """Compare what a plan says of loops with the program's.

    Args:
        plan: the plan.
        pairs: the program's pairs of loops, in their order.

    Raises:
        ValueError: it names pairs, steps or values that are not there.
    """
    numbers = [at for at, _ in plan.loops]
    if len({*numbers}) < len(numbers) or not all(at < len(pairs) for at in numbers):
        raise ValueError(f"loops, expected some of {len(pairs)} pairs, each once, found {numbers[:10]}")
    for at, choice in plan.loops:
        length, values = pairs[at].length, len(pairs[at].forward.body.avals)
        if choice.chunk is not None and choice.chunk > length:
            raise ValueError(f"loops, expected chunks of at most {length} steps, found {choice.chunk}")
        if len(choice.earlier) > MOST_KINDS or sum(one.all_steps for one in choice.earlier) >= length:
            raise ValueError(f"loops, expected at most {MOST_KINDS} kinds of chunks before the last, in {length} steps")
        sets = (choice.saved, choice.in_chunk, choice.host, *(one.in_chunk for one in choice.earlier))
        if not all(value < values for one in sets for value in one):
            raise ValueError(f"loops, expected ids of the {values} values of the loop's body")


def _figures(values: dict[str, Any] | None) -> Figures | None:
    return None if values is None else Figures.from_json(values)


def digest(names: tuple[str, ...]) -> str:
    """A short fingerprint of a saved set."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _loop_choice(loop: dict[str, Any]) -> LoopChoice:
    # Plans of before there were such things do not say anything of them.
    earlier = tuple(Chunks(one["number"], one["steps"], frozenset(one["in_chunk"])) for one in loop.get("earlier", ()))
    saved, in_chunk = frozenset(loop["saved"]), frozenset(loop["in_chunk"])
    host = frozenset(loop.get("host", ()))
    return LoopChoice(saved, loop["chunk"], loop["update"], in_chunk, earlier, loop.get("step_bytes"), host)


def _digest_of_schedule(document: dict[str, Any]) -> str:
    """Of all that says how the step is written."""
    parts = [document[name] for name in ("choice", "schedule", "loops")]
    parts += [{name: document[name]} for name in (*_MARKS, "chunks", "transfers") if name in document]
    return hashlib.sha256(json.dumps(parts, default=sorted).encode()).hexdigest()[:16]


def _to_ranges(ops: Sequence[int]) -> Ranges:
    """Op ids as (first, count) of consecutive ones: short, and the same for the same schedule."""
    ranges: list[tuple[int, int]] = []
    for op in ops:
        first, count = ranges[-1] if ranges else (-1, 0)
        if first + count == op and ranges:
            ranges[-1] = (first, count + 1)
        else:
            ranges.append((op, 1))
    return tuple(ranges)


def _from_ranges(ranges: Ranges) -> tuple[int, ...]:
    return tuple(op for first, count in ranges for op in range(first, first + count))
