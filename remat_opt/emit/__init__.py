"""From a schedule back to a jaxpr: recomputed segments under barriers, in the order that the schedule says.

`train_step.py` writes a whole step, `checkpoint.py` a function before differentiation, `zeros.py` zeros that are made
late, `host_copies.py` copies to the host's memory and back, as a schedule says (copies of scan stacks are in
`loops/stacks.py`, those of `checkpoint` in its own file), `differentiable.py` gives a written step the derivative of
the original.
"""
