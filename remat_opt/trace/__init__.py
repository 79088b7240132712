"""From a function and its arguments to a flat program: the first room. It knows JAX and nothing else of the package.

`inline.py` turns a traced jaxpr into a `Program`, a flat list of equations on numbered values: calls of `jit` and
checkpoints are entered, equal equations merged; its `can_recompute` decides whether an equation may run twice.
`evaluation.py` evaluates equations, `traced.py` traces a function in the place of one. `compat.py` is the only file
that reaches into private JAX, and has the sets of primitives that may not run twice (`STATEFUL`, `COLLECTIVES`);
`effects.py` finds these in an equation and its inner jaxprs, `nested.py` changes such jaxprs. `supported.py` checks the
version of JAX at the import. `flops.py` counts FLOPs: a rule for a primitive is an entry of its table.

Facts about a program: `primitives.py` (elementwise, reductions, moves), `avals.py` (types), `images.py` (which values
are images), `views.py` (which take no buffer of their own), `unrolled.py` (which a compiler cuts into pieces),
`names.py` (what values are called), `scopes.py` (name scopes of what is recomputed), `fingerprint.py` (what a saved
plan is recognised by), `placement.py` (shardings and devices), `platforms.py` (platforms that share a compiler),
`workspaces.py` (what compilers need beside operands and results). `mapped.py` divides a `shard_map`, `pool_parts.py`
has the primitives of a rewritten pool.
"""
