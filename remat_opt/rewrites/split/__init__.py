"""Splits the batch: the part of a program that depends on it row by row runs in a loop over chunks, exactly.

`batch.py` finds the batch among the arguments and is the way in. `layouts.py` has the words: how a value lies with
respect to the batch, how an equation runs on a chunk, and how chunk results are combined (`Sum`; sums accumulate in
float32 at least). Rules, by the primitive: `rules.py`, with `indexing.py` (gathers and scatters), `random.py`,
`bodies.py` (control flow) and `sums.py` (what may be done to parts of a sum). `analysis.py` applies them to a program,
`stages.py` puts what they say into loops, `chunks.py` evaluates equations on one chunk, `write.py` writes the new
program. `devices.py` is for batches that a mesh divides, `mapped.py` for those inside a `shard_map` of the user's.
"""
