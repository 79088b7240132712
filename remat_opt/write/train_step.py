"""The step writer: a schedule of the joint program (forward, backward and optimizer) as JAX operations.

A recomputed run becomes what JAX leaves behind after differentiating a `jax.checkpoint`: one `remat_p` equation, whose
lowering takes its inputs through an `optimization_barrier`. The cotangents that the run waits for go through the same
barrier and come out as its results, so that no compiler can do the run before they exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.graph.build import Bridge
from remat_opt.graph.schedule import Schedule
from remat_opt.graph.timeline import Crossing, guards, timeline
from remat_opt.program import compat
from remat_opt.program.inline import Constant


def write(bridge: Bridge, schedule: Schedule, saved_names: dict[int, str], arguments: Sequence[Any]) -> list[Any]:
    """Evaluate the schedule on arguments or tracers.

    Args:
        bridge: the graph and its equations.
        schedule: what runs when.
        saved_names: for each saved value the `checkpoint_name` it carries.
        arguments: one value for each input of the program.

    Returns:
        One value for each output of the program.
    """
    return _Writer(bridge, saved_names).run(schedule, arguments)


class _Writer:
    def __init__(self, bridge: Bridge, saved_names: dict[int, str]):
        self.bridge = bridge
        self.program = bridge.program
        self.saved_names = saved_names
        self.policy = jax.checkpoint_policies.save_only_these_names(*sorted(set(saved_names.values())))
        self.environment: dict[int, Any] = {}

    def run(self, schedule: Schedule, arguments: Sequence[Any]) -> list[Any]:
        self.environment.update(zip(self.program.inputs, arguments, strict=True))
        self.environment.update(self.program.constants)
        self.guards = guards(self.bridge.graph, schedule)
        for stage in timeline(self.bridge.graph, schedule):
            if stage.crossing is None:
                self.evaluate(stage.run.ops, self.environment, first_run=True)
            else:
                self.recompute(stage.run.ops, stage.crossing)
        constants: dict[int, Any] = {}
        return [self.read(atom, self.environment, constants) for atom in self.program.outputs]

    def evaluate(self, ops: Sequence[int], environment: dict[int, Any], *, first_run: bool) -> None:
        constants: dict[int, Any] = {}  # made afresh in each run: none is ever carried from one to another
        for op in ops:
            equation = self.program.equations[self.bridge.equation_of[op]]
            if first_run and op in self.guards:
                together = self.guards[op]
                behind = lax.optimization_barrier([environment[value] for value in together])
                environment.update(zip(together, behind, strict=True))
            self.evaluate_equation(equation, environment, constants)
            if first_run:
                for value in equation.outputs:
                    if value in self.saved_names:
                        name = self.saved_names[value]
                        environment[value] = compat.name_p.bind(environment[value], name=name)

    def evaluate_equation(self, equation: Any, environment: dict[int, Any], constants: dict[int, Any]) -> None:
        inputs = [self.read(atom, environment, constants) for atom in equation.inputs]
        with compat.equation_context(equation.source_info, equation.context):
            outputs = compat.bind_equation(equation.primitive, equation.params, inputs)
        target = (
            constants if equation.outputs and equation.outputs[0] in self.bridge.constant_equations else environment
        )
        target.update(zip(equation.outputs, outputs, strict=True))

    def read(self, atom: int | Constant, environment: dict[int, Any], constants: dict[int, Any]) -> Any:
        if isinstance(atom, Constant):
            return atom.value
        if atom not in self.bridge.constant_equations:
            return environment[atom]
        if atom not in constants:
            equation = self.program.equations[self.bridge.constant_equations[atom]]
            self.evaluate_equation(equation, environment, constants)
        return constants[atom]

    def recompute(self, ops: Sequence[int], crossing: Crossing) -> None:
        covered = crossing.covered
        results = (*crossing.makes, *crossing.passed_on)

        def segment(*values):
            environment = dict(zip(covered, values, strict=True))
            self.evaluate(ops, environment, first_run=False)
            return [environment[value] for value in results]

        inputs = [self.environment[value] for value in covered]
        jaxpr = jax.make_jaxpr(segment)(*inputs)
        outputs = compat.bind_remat(compat.bare_jaxpr(jaxpr), inputs, [True] * len(inputs), self.policy)
        self.environment.update(zip(results, outputs, strict=True))
