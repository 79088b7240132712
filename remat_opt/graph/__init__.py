"""The one memory model: what each operation and value of a program costs, and what is live when.

`build.py` is the bridge from a `Program` to a `Graph` of plain integers; nothing else here or in `search/` sees JAX.
`liveness.py` simulates a schedule and is the only definition of live bytes and of the peak; `schedule.py` says what a
schedule is, `fusion.py` what XLA stores, `cost.py` what an operation takes in seconds. `pins.py` and `cpu_pins.py` find
where a compiler has to be told the order of two kernels.
"""
