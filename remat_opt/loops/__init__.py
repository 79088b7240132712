"""Loops of a step: pairs of a forward and a backward `scan`, their options, and how they are rewritten.

Choosing: `pairs.py` finds them in a program, `body.py` is a scan with its body as a program. `choice.py` is the record
of how one pair is written (`LoopChoice`), `recomputation.py` works out what each step of the reverse loop then
recomputes, `costs.py` what that takes. `options.py` lists the choices that are tried, root-of-length chunks among them;
`division.py` divides into chunks of several kinds. `choose.py` picks one for each pair. `equal.py` says which pairs are
the same, `no_gain.py` why there is nothing to gain. `steps.py` is the interface (`StepSearch`) by which a loop gets a
schedule for one of its steps; `planner/loop_search.py` implements it.

Writing: `pair_plan.py` is one pair with all that was decided about it. `rewrite.py` puts new loops into the program;
`forward.py` traces the forward one and says how both are written, `reverse.py` traces the reverse one,
`reverse_step.py` one step of that; `stacks.py` has the stacks by which they hand values on. `update.py` moves the
optimizer's update inside. `inside.py` rewrites the bodies of loops, branches and maps.
"""
