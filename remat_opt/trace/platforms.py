"""Names of the platforms that share a compiler, as JAX lowers for them."""

GPUS = frozenset({"cuda", "rocm"})
EXPANDING = GPUS | {"cpu"}  # whose compilers expand the backward pass of a pool (`select_and_scatter_expander.cc`)
