"""How long a TPU reads and writes by index: one element after the other.

XLA's estimates decide what waits on the chip meanwhile (`tpu.py`), and these are what they come to: a buffer that waits
for one scatter is sent away where the scatter has 114,688 indices, and stays where it has 106,496; of a gather 229,376
and 196,608.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import primitives as P

from remat_opt.graph.tiles import elements_by_rows
from remat_opt.program.inline import Equation, Program
from remat_opt.program.primitives import named

SCATTERS = named("scatter scatter_add scatter_mul scatter_min scatter_max scatter_sub")
GATHERED, SCATTERED = 6.2e-9, 11.8e-9  # seconds for each index


def seconds_by_index(equation: Equation, program: Program) -> float:
    """Seconds for which a gather or a scatter goes through its indices; 0 for all else.

    An index of a single element lies where that does, in tiles that are filled up, and each place there has its turn.
    """

    def shape_of(operand: int) -> tuple[int, ...]:
        x = equation.inputs[operand]
        aval: Any = program.aval_of(x)
        return aval.shape

    if equation.primitive is P.gather_p:
        window, each = math.prod(equation.params["slice_sizes"]), GATHERED
    elif equation.primitive in SCATTERS:
        updates = shape_of(2)
        window = math.prod(updates[at] for at in equation.params["dimension_numbers"].update_window_dims)
        each = SCATTERED
    else:
        return 0.0
    indices = shape_of(1)[:-1]  # the last dimension has those of one element
    return each * (elements_by_rows(indices) if window == 1 else math.prod(indices))
