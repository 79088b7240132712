"""Planning: from the captured program to a `Decision`.

`step.py` is the entry (`read_step`, `decide_step`). `planning.py` decides for the least memory or takes a user's plan.
It also writes the note "nothing to gain"; `callable/warnings_once.py` issues it as a warning. `budget_loop.py` checks
budgets against the compiler and meets them by compiling candidates. `batch_size.py` finds the largest batch that fits
one. `forms.py` weighs the step as it was given against its batch in chunks, `candidates.py` holds the variants of a
form and searches each. `prepared.py` is a program with its graph. `splitting.py` checks the chunks that a user asks
for. `loop_search.py` schedules the steps and bodies of loops. `decision.py` is the `Decision` and the `Planner` that
every way of planning uses. `plan.py` is the `Plan`: its file format, and whether it fits a program; `plan_checks.py`
validates the fields of a file, `plan_files.py` stores plans next to JAX's compilation cache. `collectives.py` handles
sharded steps, `offloading.py` checks copies to the host, `fallback.py` `on_error="plain"`. `tuning.py` takes the
fastest of a few plans that run on the device. `settings.py` and `budget.py` parse the user's options, `progress.py`
shows a long search. `segmentation.py` and `checkpoint_planning.py` plan a function under `remat_opt.checkpoint`, before
differentiation.
"""
