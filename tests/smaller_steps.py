"""The steps of `training_steps.STEPS` at sizes at which a test sees the same, sooner."""

from dataclasses import replace
from functools import partial

from training_steps import STEPS, StepCase

TRANSFORMERS = ("transformer", "dropout", "checkpoint_blocks", "checkpoint_policy", "hand_written_attention")
# The benchmarks keep figures of the full sizes.
SMALLER: dict[str, dict[str, int]] = {
    **{name: {"layers": 4, "batch": 8} for name in TRANSFORMERS},
    "mlp": {"hidden_layers": 12},
    "gan": {"hidden_layers": 5},
    "nnx": {"hidden_layers": 5},
    "nnx_jit": {"hidden_layers": 5},
    "mixed_precision": {"hidden_layers": 8},
    "micro_batches": {"hidden_layers": 8},
}


def smaller_case(name: str) -> StepCase:
    """A case of `STEPS` at the size of `SMALLER`."""
    case = STEPS[name]()
    return replace(case, make_args=partial(case.make_args, **SMALLER.get(name, {})))
