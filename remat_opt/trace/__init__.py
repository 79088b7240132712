"""From a function and its arguments to a flat program: the first room. It knows JAX and nothing else of the package.

`inline.py` turns a traced jaxpr into a `Program`, a flat list of equations on numbered values: calls of `jit` and
checkpoints are entered, equal equations merged. `compat.py` is the only file that reaches into private JAX or depends
on its version; `supported.py` says which versions are taken, `avals.py` what types of values tell. `effects.py` says
what may not run twice, `flops.py` what an equation costs (a rule for a primitive is an entry of its table),
`primitives.py` which primitives are elementwise, reductions or moves, `fingerprint.py` what a saved plan is recognised
by, `names.py` what values are called.
"""
