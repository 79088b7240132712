"""The callables that replace the user's function: calls, caches, options, warnings.

`resolving.py` is the entry: it finds the function inside the object that a user passes. `adapters.py` recognises nnx
and equinox modules among the arguments, and the objects of `nnx.jit` and `eqx.filter_jit`, without importing either.
`function.py` is the `OptimizedFunction`, which is called like a `jax.jit` function; `planned.py` keeps its jits and
what was decided for each signature; `bound.py` is one with arguments bound. `checkpointing.py` is the function under
`remat_opt.checkpoint`: it lists its variants (loops unchanged, each scan body or chunk of steps under `checkpoint`,
carry on the host) and writes the chosen one; `planner/checkpoint_planning.py` chooses. `checkpoint_outcomes.py` keeps
what was decided, `checkpoint_policy.py` the user's policy there; `measure.py`, `frontier.py` and `largest_batch.py`
implement the functions of these names. `jit_options.py`, `static_arguments.py` and `compiling.py` compile as a call
would, `tuning.py` runs candidates on the arguments of a call. `warnings_once.py` and `donation.py` warn users, with the
category of `warning.py`. `closed_over.py` restores modules after a trace has failed, `objects.py` says what to write
where an argument is a plain object.
"""
