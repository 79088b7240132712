"""The searches by name. Each takes a `Problem` and a budget and returns a `Solution`."""

from remat_opt.search import auto
from remat_opt.search.problem import Problem, Solution, Solver

SOLVERS: dict[str, Solver] = {"auto": auto.solve}

__all__ = ["SOLVERS", "Problem", "Solution", "Solver"]
