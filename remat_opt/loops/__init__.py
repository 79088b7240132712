"""Loops of a step: pairs of a forward and a backward `scan`, their options, and how they are rewritten.

`pairs.py` finds the pairs. `choice.py` describes one way to write a pair, `costs.py` and `memory.py` what it costs.
`options.py` lists the ways to try, `choose.py` picks one for each pair, `equal.py` finds equal pairs. `rewrite.py`,
`write.py` and `reverse.py` write the two loops; `update.py` moves the optimizer's update inside. `inside.py` rewrites
the bodies of loops, branches and maps, which are programs of their own. `steps.py` is the interface to the search.
"""
