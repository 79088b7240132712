"""The callables that replace the user's function: calls, caches, options, warnings.

`resolving.py` is the entry: it finds the function inside the object that a user passes, and `adapters.py` handles the
objects of `nnx.jit` and `eqx.filter_jit`. `function.py` has the `OptimizedFunction`, which is called like a `jax.jit`
function; `checkpointing.py` has the function under `remat_opt.checkpoint`; `measure.py` and `frontier.py` implement
`measure` and `frontier`. `jit_options.py` and `compiling.py` compile as a call would. `warnings_once.py` and
`donation.py` warn users. `closed_over.py` restores modules after a trace has failed.
"""
