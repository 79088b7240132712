"""The callables that replace the user's function: calls, caches, options, warnings.

`resolving.py` is the front door: it finds the function inside whatever a user hands in, and `adapters.py` knows the
objects of `nnx.jit` and `eqx.filter_jit`. `function.py` is the `OptimizedFunction` that is called like `jax.jit`'s,
`planned.py` keeps its jits and what was decided for each signature. `checkpointing.py` is the function under
`remat_opt.checkpoint`, `measure.py` and `frontier.py` answer `measure` and `frontier`. `jit_options.py` and
`compiling.py` compile as a call would, `warnings_once.py` and `donation.py` tell users what they should know,
`closed_over.py` leaves modules as they were where a trace fails.
"""
