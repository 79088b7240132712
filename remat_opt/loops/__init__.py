"""Loops of a step: pairs of a forward and a backward `scan`, their options, and how they are rewritten.

`pairs.py` finds them, `choice.py` says what can be done to one, `costs.py` and `memory.py` what that costs,
`options.py` what is tried, `choose.py` what is taken, `equal.py` which pairs are the same. `pair_plan.py` is one pair
with all that was decided about it; `rewrite.py`, `write.py`, `reverse.py` and `reverse_step.py` write its two loops,
through the stacks of `stacks.py`, and `update.py` moves the optimizer's update inside. `inside.py` enters the bodies of
loops, branches and maps, which are programs of their own. `steps.py` is what is asked of the search.
"""
