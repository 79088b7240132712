"""Names of the platforms that share a compiler, as JAX lowers for them."""

GPUS = frozenset({"cuda", "rocm"})
