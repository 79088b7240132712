"""Twenty training steps that differ as much as steps do, and are not in `remat_opt.examples`.

`NETWORKS` builds them by name; `predicted_memory` measures them as others.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.unseen import sequences, signals
from benchmarks.unseen.step import Unseen

NETWORKS: dict[str, Callable[[], Unseen]] = {
    "mamba": sequences.mamba,
    "dlrm": sequences.dlrm,
    "graph_attention": sequences.graph_attention,
    "speech": sequences.speech,
    "points": sequences.points,
    "two_views": sequences.two_views,
    "moe": sequences.moe,
    "perceiver": sequences.perceiver,
    "chunked_loss": sequences.chunked_loss,
    "neural_ode": signals.neural_ode,
    "wavenet": signals.wavenet,
    "learning_to_learn": signals.learning_to_learn,
    "fourier_operator": signals.fourier_operator,
    "gradient_penalty": signals.gradient_penalty,
    "private": signals.private,
    "automaton": signals.automaton,
    "long_convolution": signals.long_convolution,
    "capsules": signals.capsules,
    "equilibrium": signals.equilibrium,
    "splines": signals.splines,
}
