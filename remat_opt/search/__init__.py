"""The searches by name. Each takes a `Problem` and a budget and returns a `Solution`."""

from remat_opt.search import auto, chen, feng_huang, hong, lower_sets, milp, rotor
from remat_opt.search.auto import search_of
from remat_opt.search.problem import Problem, Solution, Solver

SOLVERS: dict[str, Solver] = {
    "auto": auto.solve,
    "chen": chen.solve,
    "feng_huang": feng_huang.solve,
    "hong": hong.solve,
    "lower_sets": lower_sets.solve,
    "milp": milp.solve,
    "rotor": rotor.solve,
}

__all__ = ["SOLVERS", "Problem", "Solution", "Solver", "search_of"]
