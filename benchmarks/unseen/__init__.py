"""Training steps written after the rules of the memory model, of kinds that users train and that are neither in
`remat_opt.examples` nor in `held_out.py`.

`NETWORKS` builds them by name; `predicted_memory` measures them as others.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.unseen import fresh, further, gradients, images, language, lately, latest, newest, others, recent
from benchmarks.unseen.step import Unseen

NETWORKS: dict[str, Callable[[], Unseen]] = {
    "accumulate": images.accumulate,
    "neural_ode": others.neural_ode,
    "mamba": language.mamba,
    "ppo": others.ppo,
    "llama": language.llama,
    "moe": language.moe,
    "diffusion": images.diffusion,
    "vae": images.vae,
    "efficientnet": images.efficientnet,
    "conv3d": images.conv3d,
    "wavenet": others.wavenet,
    "transformer_xl": language.transformer_xl,
    "dlrm": others.dlrm,
    "perceiver": others.perceiver,
    "chunked_loss": language.chunked_loss,
    "clip": others.clip,
    "t5": language.t5,
    "masked_words": further.masked_words,
    "averaged_weights": further.averaged_weights,
    "graph_attention": further.graph_attention,
    "speech": further.speech,
    "segmentation": further.segmentation,
    "shifted_windows": further.shifted_windows,
    "radiance_field": further.radiance_field,
    "two_views": further.two_views,
    "retention": further.retention,
    "points": further.points,
    "adapters": further.adapters,
    "learning_to_learn": further.learning_to_learn,
    "flow": lately.flow,
    "distillation": lately.distillation,
    "super_resolution": lately.super_resolution,
    "fourier_operator": lately.fourier_operator,
    "detector": lately.detector,
    "grouped": lately.grouped,
    "quantised": lately.quantised,
    "gradient_penalty": gradients.gradient_penalty,
    "differential_equation": gradients.differential_equation,
    "private": gradients.private,
    "sharpness_aware": gradients.sharpness_aware,
    "long_convolution": latest.long_convolution,
    "mixing": latest.mixing,
    "triangles": latest.triangles,
    "orthogonalised": latest.orthogonalised,
    "equilibrium": latest.equilibrium,
    "dreaming": latest.dreaming,
    "style": newest.style,
    "objects": newest.objects,
    "automaton": newest.automaton,
    "shuffled": fresh.shuffled,
    "pixels": fresh.pixels,
    "modulated": fresh.modulated,
    "board": fresh.board,
    "looking_back": fresh.looking_back,
    "capsules": fresh.capsules,
    "rainfall": recent.rainfall,
    "tagged": recent.tagged,
    "molecules": recent.molecules,
    "preferred": recent.preferred,
    "splines": recent.splines,
    "resolutions": recent.resolutions,
}
