"""Plans as text, for comparing them between processes."""

import dataclasses

from remat_opt import Plan


def planned(plan: Plan) -> str:
    """A plan's text without the seconds that compiling took."""
    figures = {name: getattr(plan, name) for name in ("measured", "plain_measured")}
    timeless = {name: found and dataclasses.replace(found, compile_seconds=0.0) for name, found in figures.items()}
    return dataclasses.replace(plan, **timeless).to_json()
