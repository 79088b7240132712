"""The versions of JAX that are supported, checked before anything is imported that an old one may not have."""

from __future__ import annotations

import warnings

import jax

from remat_opt.trace.platforms import GPUS

LOWEST_JAX = (0, 10)
HIGHEST_JAX = (0, 12)


def check_jax_version(version: str = jax.__version__) -> None:
    """Refuse a JAX that is too old, warn about one that is newer than was tested.

    Raises:
        ImportError: `version` is below `LOWEST_JAX`; the message says what to install.
    """
    found = tuple(int(part) for part in version.split(".")[:2])
    lowest, highest = (".".join(map(str, bound)) for bound in (LOWEST_JAX, HIGHEST_JAX))
    above = f"{HIGHEST_JAX[0]}.{HIGHEST_JAX[1] + 1}"
    if found < LOWEST_JAX:
        raise ImportError(
            f'remat_opt needs jax {lowest} to {highest}, found {version}; write: pip install "jax>={lowest},<{above}"'
        )
    if found > HIGHEST_JAX:
        warnings.warn(
            f"remat_opt was tested with jax {lowest} to {highest}, found {version}: results stay right where JAX's "
            "jaxprs keep their meaning, memory may differ",
            stacklevel=2,
        )


def miscompiles_offloaded_loops(platform: str) -> bool:
    """Whether loops with residuals in the host's memory have wrong gradients (openxla/xla issue 46231)."""
    return platform in GPUS and jax.lib.__version__ == "0.11.0"


check_jax_version()
