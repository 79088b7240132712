"""The searches: each takes a `Problem` (a graph) and a budget in bytes, and returns a `Solution`. No JAX.

`problem.py` defines the input and output of every search. A new solver is a file with `solve(problem, budget)` and an
entry in `SOLVERS`, below in this file. `auto.py` is the default. It generates candidates by several models
(`structures.py`, `candidate_generator.py`, with `cuts.py`, `segments.py`, `stages.py`, `nested.py`, `rotor.py`,
`expensive.py`, on the forward part that `forward.py` finds), and improves their schedules by local search
(`drop_recomputation.py`, `local_search.py`, `eviction.py`). `offload.py` moves saved values to the host's memory
(`stays.py`: when). Each published algorithm has a file: `chen.py`, `feng_huang.py` (with `division_tree.py`),
`hong.py`, `lower_sets.py`. `caching.py` keeps answers, `progress.py` reports how far a search is.
"""

from remat_opt.search import auto, chen, feng_huang, hong, lower_sets, rotor
from remat_opt.search.auto import search_of
from remat_opt.search.problem import Problem, Solution, Solver

SOLVERS: dict[str, Solver] = {
    "auto": auto.solve,
    "chen": chen.solve,
    "feng_huang": feng_huang.solve,
    "hong": hong.solve,
    "lower_sets": lower_sets.solve,
    "rotor": rotor.solve,
}

__all__ = ["SOLVERS", "Problem", "Solution", "Solver", "search_of"]
