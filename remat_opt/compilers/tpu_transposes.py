"""Transposes for Fourier transforms, which a TPU's compiler takes up through elementwise work to those behind others.

A sum of what one transform made and turned, and of something else, is turned for the next transform: the compiler turns
the summands instead, of which the first then is as the transform made it. Who reads the sum as it was reads another
one, so that there are two from then on. (Products read and make their dimensions in any order; transposes before and
behind them are part of them.)
"""

from __future__ import annotations

import dataclasses

from jax.extend.core import primitives as P

from remat_opt.program.inline import Constant, Equation, Program
from remat_opt.program.primitives import ELEMENTWISE


def with_transposes_undone(program: Program) -> Program:
    """A program with a second run of elementwise work for each transpose of it that a transform reads and that undoes
    the one behind another."""
    turning = _Turning(program)
    for equation in program.equations:
        turning.take(equation)
    if not turning.is_changed:
        return program
    return dataclasses.replace(program, avals=tuple(turning.avals), equations=tuple(turning.equations))


class _Turning:
    def __init__(self, program: Program):
        self.avals = list(program.avals)
        self.equations: list[Equation] = []
        self.is_changed = False
        self._maker = {value: equation for equation in program.equations for value in equation.outputs}
        self._transformed = {
            x for equation in program.equations if equation.primitive is P.fft_p for x in equation.inputs
        }
        self._turned: dict[tuple[int, tuple[int, ...]], int] = {}  # what is made already, by value and permutation

    def take(self, equation: Equation) -> None:
        given = equation.inputs[0] if equation.primitive is P.transpose_p else None
        if not isinstance(given, int) or equation.outputs[0] not in self._transformed:
            self.equations.append(equation)
            return
        permutation = tuple(equation.params["permutation"])
        if self._is_work(given) and self._undoes(given, permutation):
            self._again(self._maker[given], permutation, equation, equation.outputs[0])
        else:
            self.equations.append(equation)

    def _is_work(self, value: int) -> bool:
        """Whether elementwise work makes a value, of whole arrays and numbers."""
        maker = self._maker.get(value)
        if maker is None or maker.primitive not in ELEMENTWISE or len(maker.outputs) != 1:
            return False
        shape = self.avals[value].shape
        return all(self._aval(x).shape in (shape, ()) for x in maker.inputs)

    def _undoes(self, value: int, permutation: tuple[int, ...]) -> bool:
        """Whether a permutation undoes a transpose that elementwise work begins with."""
        seen, waiting = {value}, [value]
        while waiting:
            for x in self._maker[waiting.pop()].inputs:
                if isinstance(x, Constant) or x in seen or not self.avals[x].shape:
                    continue
                seen.add(x)
                if self._before(x, permutation) is not None:
                    return True
                if self._is_work(x):
                    waiting.append(x)
        return False

    def _before(self, value: int, permutation: tuple[int, ...]) -> int | None:
        """What a transform made of which a value is a transpose that the permutation undoes."""
        maker = self._maker.get(value)
        if maker is None or maker.primitive is not P.transpose_p:
            return None
        (given,) = maker.inputs
        transform = self._maker.get(given) if isinstance(given, int) else None
        if not isinstance(given, int) or transform is None or transform.primitive is not P.fft_p:
            return None
        first = tuple(maker.params["permutation"])
        return given if [first[at] for at in permutation] == list(range(len(first))) else None

    def _again(self, work: Equation, permutation: tuple[int, ...], transpose: Equation, result: int) -> None:
        self.is_changed = True
        inputs = tuple(self._as_turned(x, permutation, transpose) for x in work.inputs)
        self.equations.append(dataclasses.replace(work, inputs=inputs, outputs=(result,)))
        self._turned[work.outputs[0], permutation] = result

    def _as_turned(self, x: int | Constant, permutation: tuple[int, ...], transpose: Equation) -> int | Constant:
        if isinstance(x, Constant) or not self.avals[x].shape:
            return x
        before = self._before(x, permutation)
        if before is not None:
            return before
        key = (x, permutation)
        if key not in self._turned:
            self._turned[key] = result = len(self.avals)
            aval = self.avals[x]
            self.avals.append(aval.update(shape=tuple(aval.shape[at] for at in permutation)))
            if self._is_work(x):
                self._again(self._maker[x], permutation, transpose, result)
            else:
                self.equations.append(dataclasses.replace(transpose, inputs=(x,), outputs=(result,)))
        return self._turned[key]

    def _aval(self, x: int | Constant):
        return x.aval if isinstance(x, Constant) else self.avals[x]
