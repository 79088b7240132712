"""The tables that `python -m benchmarks.run` makes: their rows, and what the sources say of the same networks."""

from __future__ import annotations

from dataclasses import dataclass

POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable")
"""Of `jax.checkpoint_policies`; the others save or offload what has been named."""

OFFLOAD_DOTS = "offload_dots"
"""The policy `offload_dot_with_no_batch_dims`, to the host's pinned memory."""

BY_FLOPS = "ours-by-flops"
OURS = ("ours", BY_FLOPS)
"""What `optimize` gives: the least estimated time, or the fewest FLOPs."""

SPLIT = "split"
"""What `optimize` gives with the batch in chunks: `split@8` in eight."""

OFFLOAD, TUNED = "offload", "tuned"
"""What `optimize` gives with values on the host, and after it timed plans on the attached device."""

VARIANTS = (
    "plain",
    "nn.remat",
    "chen",
    *POLICIES,
    "ours",
    "ours@nn.remat",
    "ours@dots_saveable",
    "ours@0.5",
    "ours@0.3",
)
"""The columns, see `benchmarks.variants`."""


def is_planned(variant: str) -> bool:
    """Whether a variant is a plan of `optimize`, and no step that JAX and Flax alone make."""
    return variant.partition("@")[0] in (*OURS, SPLIT, OFFLOAD, TUNED, "chen")


@dataclass(frozen=True)
class Published:
    """A source's own figures of a row.

    Attributes:
        plain_mb: memory without weights of the plain step, MB; None where the source gives a ratio only.
        optimized_mb: the same of its own method; None likewise.
        cut: the part of the memory that it saves.
        extra_time: what that costs, as a part of the plain step's time; None where it does not say.
        in_theory_mb: MB that the source's own solver says for its own graph, plain and optimised: checkpoints and the
            largest segment, without gradients; None where it was not run.
        by_partitioner_mb: the lowest peak in MB that PyTorch 2.13's min-cut partitioner reaches at any
            `activation_memory_budget`, by a liveness walk over its graphs with gradients and without parameters; None
            where it was not run.
    """

    cut: float
    plain_mb: float | None = None
    optimized_mb: float | None = None
    extra_time: float | None = None
    in_theory_mb: tuple[float, float] | None = None
    by_partitioner_mb: float | None = None


@dataclass(frozen=True)
class Row:
    """One network of `remat_opt.examples`, by default at its source's batch and size of input.

    Attributes:
        network: one of `remat_opt.examples.EXAMPLES`.
        batch: examples in a batch; None for the source's.
        size: of an input, see `remat_opt.examples.Task`; None for the source's.
        small: the network's small twin, which compiles in seconds.
        dtype: of the computation; parameters are float32.
        published: the source's figures.
    """

    network: str
    batch: int | None = None
    size: int | None = None
    small: bool = False
    published: Published | None = None
    dtype: str = "float32"

    @property
    def key(self) -> str:
        """Its name in the results."""
        given = [f"{name}={value}" for name, value in (("batch", self.batch), ("size", self.size)) if value]
        given += [self.dtype] if self.dtype != "float32" else []
        return " ".join([self.network, *(["small"] if self.small else []), *given])


def _feng_huang(network: str, plain: int, theirs: int, cut: int, time: int) -> Row:
    in_theory = _IN_THEORY.get(network)
    in_theory_mb = None if in_theory is None else (in_theory[0] * _MEBIBYTE, in_theory[1] * _MEBIBYTE)
    lowest = _BY_PARTITIONER.get(network)
    by_partitioner_mb = None if lowest is None else lowest * _MEBIBYTE
    return Row(network, published=Published(cut / 100, plain, theirs, time / 100, in_theory_mb, by_partitioner_mb))


_MEBIBYTE = 2**20 / 1e6
# What the sources' own programs say, run on the same networks, batches and sizes; MiB.
_IN_THEORY = {
    "alexnet": (2899, 1065),
    "vgg16": (3720, 1813),
    "resnet18": (5024, 1960),
    "resnet34": (3737, 1054),
    "resnet50": (5146, 1470),
    "resnet101": (3822, 833),
    "resnet152": (2683, 466),
    "densenet121": (4061, 737),
    "densenet161": (3775, 588),
    "densenet201": (3149, 442),
    "inception_v3": (2880, 658),
}
_BY_PARTITIONER = {"resnet50": 2730, "densenet121": 752}

# Feng & Huang, table of their repository: batches and sizes are those of the examples.
FENG_HUANG = (
    _feng_huang("alexnet", 4955, 3287, 34, 34),
    _feng_huang("vgg11", 3577, 2781, 22, 34),
    _feng_huang("vgg13", 5136, 3565, 31, 33),
    _feng_huang("vgg16", 5136, 3565, 31, 32),
    _feng_huang("vgg19", 5189, 3565, 31, 33),
    _feng_huang("resnet18", 5635, 3677, 35, 30),
    _feng_huang("resnet34", 4079, 1838, 55, 35),
    _feng_huang("resnet50", 5323, 1973, 63, 31),
    _feng_huang("resnet101", 3934, 1024, 74, 35),
    _feng_huang("resnet152", 2767, 526, 81, 37),
    _feng_huang("densenet121", 4027, 898, 78, 34),
    _feng_huang("densenet161", 3751, 666, 82, 36),
    _feng_huang("densenet169", 4862, 897, 82, 32),
    _feng_huang("densenet201", 3146, 474, 85, 53),
    _feng_huang("inception_v3", 3074, 881, 71, 29),
    _feng_huang("nasnet", 5832, 1129, 81, 31),
    _feng_huang("amoebanet", 4944, 1058, 79, 36),
    _feng_huang("darts", 5627, 1115, 80, 55),
)

# Chen et al., section 5: 48 → 7 GB, and "more than 4×".
CHEN = (
    Row("resnet1001", published=Published(1 - 1 / 6.9, 48_000, 7_000, 0.30)),
    Row("lstm", published=Published(0.75, extra_time=0.30)),
    Row("lstm_scan", published=Published(0.75, extra_time=0.30)),
)

TRANSFORMERS = (
    *(Row(network) for network in ("gpt", "gpt_scan", "gpt2", "gpt2_scan", "vit_b16", "vit_b16_scan")),
    Row("gpt_1b_scan", dtype="bfloat16"),
    *(Row(network) for network in ("transformer_base", "transformer_big", "dynamicconv_iwslt", "dynamicconv_wmt")),
)

OTHERS = tuple(
    Row(network)
    for network in ("wide_resnet28_2", "wide_resnet28_10", "resnet200", "unet", "randwire_small", "randwire_regular")
)

# Seconds on the CPU: what continuous integration repeats.
SMALL = (
    Row("vgg16", small=True, batch=64),
    Row("gpt_scan", small=True, batch=64),
    Row("wide_resnet28_2", small=True, batch=64, size=16),
)

# What `tune` takes beside what is taken untimed, on the CPU: `--time 5 --variants plain,ours@0.5,tuned@0.5`.
TIMED = (
    *SMALL,
    Row("resnet50", small=True, batch=32),
    Row("densenet121", small=True, batch=32),
    Row("unet", small=True, batch=8, size=92),
    Row("lstm_scan", small=True, batch=64),
    Row("transformer_base", small=True, batch=64),
)

TABLES: dict[str, tuple[Row, ...]] = {
    "feng_huang": FENG_HUANG,
    "chen": CHEN,
    "transformers": TRANSFORMERS,
    "others": OTHERS,
    "small": SMALL,
    "timed": TIMED,
}

TITLES = {
    "feng_huang": "The table of Feng & Huang",
    "chen": "The networks of Chen et al.",
    "transformers": "Transformers, as loops over their layers and written out",
    "others": "Other networks",
    "small": "Small networks, repeated by the tests",
    "timed": "The fastest of several plans, timed",
}
