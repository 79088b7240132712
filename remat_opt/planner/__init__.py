"""What is decided for a step: every stage from the captured program to a `Decision`.

`step.py` is the front door (`read_step`, `decide_step`); `planning.py` decides (least memory, a user's plan),
`budget_loop.py` is where a budget is checked against the compiler, `candidates.py` holds the variants of a step and
asks the search for each, `prepared.py` is a program with its graph, `loop_search.py` schedules loops' steps and bodies.
`decision.py` and `plan.py` are the results; `plan_checks.py` checks plans from outside, `plan_files.py` keeps plans
beside the compilation cache. `collectives.py` is for steps that are divided among devices, `processes.py` for several
hosts, `fallback.py` for `on_error="plain"`, `settings.py` and `budget.py` for what a user writes. `segmentation.py` and
`checkpoint_planning.py` plan what `remat_opt.checkpoint` is given, before differentiation.
"""
