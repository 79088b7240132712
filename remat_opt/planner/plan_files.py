"""Stores plans next to JAX's persistent compilation cache, so that a second process finds plan and executable.

If `jax_compilation_cache_dir` is a local folder, a plan that took at least `jax_persistent_cache_min_compile_time_secs`
to make is saved in its `remat_opt_plans`. The file name is a digest of everything that the plan depends on. A file that
is damaged or has no such plan is ignored and overwritten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from remat_opt.planner.decision import Decision, Planner, versions
from remat_opt.planner.fallback import has_failed
from remat_opt.planner.plan import Plan
from remat_opt.planner.planning import take_over
from remat_opt.planner.prepared import Prepared
from remat_opt.planner.settings import Settings

_config: Any = jax.config  # whose options are attributes that no type declares
_FOLDER = "remat_opt_plans"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # environment variables that change what a compiler says


def saved_or_new(
    prepared: Prepared,
    settings: Settings,
    jit_options: dict[str, Any],
    is_measured: bool,
    decide: Callable[[], Decision],
) -> Decision:
    """The decision of a saved plan, or a new one, which is saved.

    Args:
        prepared: the step.
        settings: what the user asked for.
        jit_options: of its `jax.jit`.
        is_measured: whether candidates may be compiled.
        decide: makes a new decision.
    """
    path = plan_path(prepared, settings, jit_options, is_measured)
    if path is None:
        return decide()
    if saved := _read(path, prepared, settings):
        return saved
    started = time.perf_counter()
    decision = decide()
    if time.perf_counter() - started >= _config.jax_persistent_cache_min_compile_time_secs:
        _write(path, decision.plan)
    return decision


def plan_path(prepared: Prepared, settings: Settings, jit_options: dict[str, Any], is_measured: bool) -> Path | None:
    """The file for a plan; None without a persistent compilation cache, and for a step that is divided among devices,
    runs in several processes (which plan alike), or has a plan of the user's."""
    folder = _config.jax_compilation_cache_dir
    if not folder or "://" in folder or not _config.jax_enable_compilation_cache:
        return None
    if settings.plan is not None or prepared.is_divided or jax.process_count() > 1:
        return None
    request = (
        (prepared.fingerprint, prepared.inputs, prepared.captured.donated),
        (prepared.target, prepared.target.compiler_config),
        dataclasses.replace(settings, target=None),
        sorted((jit_options.get("compiler_options") or {}).items()),
        is_measured,
        versions(),
        [os.environ.get(name) for name in _FLAGS],
    )
    return Path(folder) / _FOLDER / f"{hashlib.sha256(repr(request).encode()).hexdigest()}.json"


def _read(path: Path, prepared: Prepared, settings: Settings) -> Decision | None:
    if not path.is_file():
        return None
    try:
        plan = Plan.load(path)
        asked = (settings.asked_budget, settings.solver, prepared.target.name, versions(), False)
        if (plan.budget, plan.solver, plan.target, plan.versions, plan.edited) != asked:
            return None
        return dataclasses.replace(take_over(Planner(prepared, settings, None), plan), plan=plan)
    except Exception:  # whatever is in the file, the step can be planned
        return None


def _write(path: Path, plan: Plan) -> None:
    """Save a plan whole or not at all; a folder that cannot be written to is left as it is."""
    if has_failed(plan.note):
        return
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(part)
        os.replace(part, path)
