"""Values that take no buffer of their own, as compilers read another value in their place."""

from __future__ import annotations

from jax.extend.core import primitives as P

from remat_opt.trace.inline import Equation, Program
from remat_opt.trace.platforms import GPUS
from remat_opt.trace.primitives import WITH_BODIES


def views_of(program: Program, platform: str) -> dict[int, int]:
    """For values that take no buffer of their own the values that are read in their place."""
    if platform == "tpu":  # whose tiles another shape cuts otherwise
        return {}
    kernels = _turned_kernels(program) if platform in GPUS else {}
    return {**_reshaped(program), **kernels}


def _reshaped(program: Program) -> dict[int, int]:
    """For reshapes of arguments the arguments, and for results that are reshaped stacks of a loop the stacks: bitcasts.

    Of arrays that are divided among devices a reshape may move rows between these.
    """
    if program.marks is not None:
        return {}
    arguments, results, stacks = set(program.inputs), set(program.outputs), set()
    found: dict[int, int] = {}
    for equation in program.equations:
        if equation.primitive in WITH_BODIES:
            stacks |= {value for value in equation.outputs if value not in results}
        if equation.primitive is not P.reshape_p or equation.params["dimensions"] is not None:
            continue
        source, result = equation.inputs[0], equation.outputs[0]
        if isinstance(source, int) and (found.get(source, source) in (stacks if result in results else arguments)):
            found[result] = found.get(source, source)
    return found


def _turned_kernels(program: Program) -> dict[int, int]:
    """For each kernel that is reversed for convolutions alone the kernel as it was.

    XLA's GPU compiler sees that a convolution is the gradient of one where the kernel's reversal is its operand. Of a
    kernel that was reversed on the other side of a barrier it would write the image with the stride's zeros.
    """
    turned = {e.outputs[0]: e.inputs[0] for e in program.equations if e.primitive is P.rev_p}
    other = {value for value in program.outputs if isinstance(value, int)}
    for equation in program.equations:
        other.update(x for at, x in enumerate(equation.inputs) if isinstance(x, int) and not _is_kernel(equation, at))
    return {value: kernel for value, kernel in turned.items() if isinstance(kernel, int) and value not in other}


def _is_kernel(equation: Equation, operand: int) -> bool:
    return equation.primitive is P.conv_general_dilated_p and operand == 1
