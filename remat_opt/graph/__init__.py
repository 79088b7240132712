"""The memory model: the costs of each operation and value of a program, and which values are live when.

`build.py` is the bridge from a `Program` to a `Graph` (`graph.py`) of plain integers; nothing else here or in `search/`
sees JAX. `liveness.py` simulates a schedule and is the only definition of live bytes and of the peak, `packing.py` says
how much a compiler allocates for them; `schedule.py` says what a schedule is, `transfers.py` how long its copies to the
host take, `derive.py` makes one from a set of saved values, `timeline.py` says what each of its runs reads and makes.
`fusion.py` decides which values XLA stores, `cost.py` how many seconds an operation takes, `tiles.py` how many bytes an
array has on a TPU. `barriers.py` and `cpu_barriers.py` find where a barrier has to fix the order of two kernels.
`tables.py` has operations on arrays of numbers.
"""
