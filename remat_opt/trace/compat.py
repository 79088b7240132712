"""The one file that knows JAX versions (0.10 to 0.12) and JAX's private fields.

Everything else imports the names of this file. Public homes are preferred (`jax.extend.core`); what has none yet is
taken from where the installed version keeps it, and each such place says what it is for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np
from jax import lax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import pjit as _pjit
from jax._src import source_info_util
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import parallel as _parallel
from jax._src.state.types import AbstractRef
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer as Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as extend_core
from jax.extend.core import primitives

Literal, Jaxpr, ClosedJaxpr = extend_core.Literal, extend_core.Jaxpr, extend_core.ClosedJaxpr
_JAXPRS = (Jaxpr, ClosedJaxpr)
intermediate_shardings = _dispatch.get_intermediate_shardings


# Primitives, by the object. Those without a public name are read off the jaxpr of a public function, once.


def _primitive_of(fun: Callable, *args) -> Any:
    return jax.make_jaxpr(fun)(*args).jaxpr.eqns[0].primitive


barrier_p = _primitive_of(lax.optimization_barrier, 1.0)
remat_p = primitives.remat_p
split_p = lax.split_p
stack_p, unstack_p = getattr(lax, "stack_p", None), getattr(lax, "unstack_p", None)
name_p = primitives.name_p
reshard_p, sharding_constraint_p = _pjit.reshard_p, _pjit.sharding_constraint_p
random_wrap_p = _primitive_of(jax.random.wrap_key_data, np.zeros(2, np.uint32))
random_unwrap_p = _primitive_of(jax.random.key_data, jax.eval_shape(lambda: jax.random.key(0)))


def _mapping() -> Any:
    """The equation of a `shard_map` in which a value is told to differ from device to device."""
    mesh = jax.sharding.AbstractMesh((1,), ("axis",))
    same, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("axis")
    fun = jax.shard_map(lambda x: lax.pcast(x, "axis", to="varying"), mesh=mesh, in_specs=same, out_specs=split)
    return jax.make_jaxpr(fun)(np.zeros(1)).jaxpr.eqns[0]


layout_constraint_p = _primitive_of(lambda x: with_layout_constraint(x, Layout((0,))), np.zeros(1))
shard_map_p = _mapping().primitive
pvary_p = _mapping().params["jaxpr"].eqns[0].primitive  # moves nothing: a type for the checks of shard_map

# XLA's own generator keeps a state on the device, and a callback's host function is the user's (see `effects.py`).
pure_callback_p = _primitive_of(lambda x: jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct((), "float32"), x), 1.0)
STATEFUL = frozenset({primitives.rng_uniform_p, pure_callback_p})


def draws_by_position(keys: Any, context: Any) -> bool:
    """Whether each element that keys of a type draw depends on its position alone, in the context of an equation."""
    return str(keys.dtype) == "key<fry>" and bool(getattr(context, "threefry_partitionable", False))


# What devices send each other inside a `shard_map`. Only some of these carry an effect that says so (`ppermute` has
# none), and a `shard_map` around them has none either. Those left out tell an index or change a type, and send nothing.
_SENDS_NOTHING = ("axis_index_p", "preduced_p", "vary_unreduced_cast_p")
COLLECTIVES = frozenset(one for one in vars(_parallel).values() if isinstance(one, extend_core.Primitive)) - {
    getattr(_parallel, name, None) for name in _SENDS_NOTHING
}


def without_axis_effects(effects: Iterable[Any]) -> frozenset:
    """Effects without those that only say that an equation names an axis of a mesh, as collectives do."""
    return frozenset(effect for effect in effects if not isinstance(effect, _core.NamedAxisEffect))


def is_reference(aval: Any) -> bool:
    """Whether a value is a mutable reference (`jax.new_ref`)."""
    return isinstance(aval, AbstractRef)


def policy_offloads(policy: Any) -> bool:
    """Whether a user's checkpoint policy moves residuals to another memory; such a region is left as it is."""
    return policy is not None and "offload" in getattr(policy, "__qualname__", type(policy).__qualname__).lower()


def bind_remat(jaxpr: Any, inputs: Sequence[Any], through_barrier: Sequence[bool], policy: Any) -> list[Any]:
    """Write what JAX leaves behind after differentiating a `jax.checkpoint`: one `remat_p` equation.

    Args:
        jaxpr: the open jaxpr of the segment, without constants.
        inputs: one value per input of `jaxpr`.
        through_barrier: for each input whether the lowering takes it through the `optimization_barrier`.
        policy: the policy that the equation carries; it is not consulted any more.
    """
    # Said of all at once where it can be: `checkify` gives an equation more inputs than a tuple is of.
    prevent_cse = True if all(through_barrier) else tuple(map(bool, through_barrier))
    return remat_p.bind(*inputs, jaxpr=jaxpr, prevent_cse=prevent_cse, differentiated=True, policy=policy)


def expands_barriers(platform: str) -> bool:
    """Whether a platform's compiler takes barriers away before it merges equal work, so that a checkpoint saves nothing
    (JAX issue 19822: the CPU's, before jax 0.12; `targets/options.py` keeps it from doing so)."""
    return platform == "cpu" and jax.__version_info__ < (0, 12)


def bind_equation(primitive: Any, params: dict[str, Any], inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation on values or tracers; always a list of outputs."""
    outputs = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(outputs) if primitive.multiple_results else [outputs]


def with_default_layout(array: Any) -> Any:
    """The same array, row-major in memory from here on; random keys, whose data has dimensions of its own, as they are.

    JAX lets XLA choose the layout of an output that comes straight from such a constraint, and then refuses donation
    for it; the barrier stands between the two.
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return lax.optimization_barrier(row_major(array))


def row_major(array: Any) -> Any:
    """The same array, row-major in memory where it is made; random keys as they are."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def shard_map_like(params: dict[str, Any], fun: Callable) -> Callable:
    """`jax.shard_map` of another function, with the mesh, the specifications and the checks of an equation."""
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


@contextlib.contextmanager
def mapped_context(params: dict[str, Any]) -> Iterator[None]:
    """What the body of a `shard_map` equation is traced under: it may name the axes of a mesh."""
    mesh = params["mesh"].abstract_mesh
    manual = dict.fromkeys((*params["newly_manual_axes"], *mesh.manual_axes), jax.sharding.AxisType.Manual)
    of_mesh = jax.sharding.use_abstract_mesh(mesh.update_axis_types(manual))
    of_axes = _core.extend_axis_env_nd([(name, mesh.shape[name]) for name in manual])
    with of_axes, of_mesh, _config._check_vma(params["check_vma"]):
        yield


@contextlib.contextmanager
def equation_context(source_info: Any, context: Any, scope: str | None = None) -> Iterator[None]:
    """Source line, name stack (a scope in front) and configuration of an equation; the mesh of a `shard_map` around."""
    outer = source_info_util.current_name_stack()
    name_stack = (outer if scope is None else outer.extend(scope)) + source_info.name_stack
    mesh = jax.sharding.get_abstract_mesh()
    mapped = jax.sharding.use_abstract_mesh(mesh) if mesh.manual_axes else contextlib.nullcontext()
    with source_info_util.user_context(source_info.traceback, name_stack=name_stack), context.manager, mapped:
        yield


def place_of(source_info: Any) -> str:
    """Where an equation comes from: its name stack, and the line of the user's program."""
    return f"{source_info.name_stack} {line_of(source_info)}"


def line_of(source_info: Any) -> str:
    """The line of the user's program that an equation comes from."""
    return source_info_util.summarize(source_info)


def nest_source_info(outer: Any, inner: Any, name: str | None) -> Any:
    """The source info of an equation inside a call that was inlined: the call's name stack, then its own."""
    stack = outer.name_stack if name is None else outer.name_stack.extend(name)
    return inner.replace(name_stack=stack + inner.name_stack)


def bare_jaxpr(jaxpr: Any) -> Any:
    """The open jaxpr of an open or a closed one (they become one class in jax 0.12)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_of(jaxpr: Any) -> list[Any]:
    """The values bound to a closed jaxpr's constant variables."""
    return list(getattr(jaxpr, "consts", ()))


def constant_variables(jaxpr: Any) -> list[Any]:
    """The constant variables of a jaxpr (in jax 0.12 a view over the leading inputs)."""
    return list(bare_jaxpr(jaxpr).constvars)


def input_variables(jaxpr: Any) -> list[Any]:
    """The variables that a caller provides: without the constants."""
    return list(bare_jaxpr(jaxpr).invars)


def jaxprs_in(params: dict[str, Any]) -> list[Any]:
    """All jaxprs among an equation's parameters, closed ones with their constants; none of a kernel's."""
    if is_kernel(params):
        return []
    found = []
    for value in params.values():
        if isinstance(value, _JAXPRS):
            found.append(value)
        elif isinstance(value, tuple):
            found += [one for one in value if isinstance(one, _JAXPRS)]
    return found


def equations_in(params: dict[str, Any]) -> Iterator[Any]:
    """All equations inside an equation with these parameters, those inside of them included."""
    for jaxpr in jaxprs_in(params):
        for equation in bare_jaxpr(jaxpr).eqns:
            yield equation
            yield from equations_in(equation.params)


def is_kernel(params: dict[str, Any]) -> bool:
    """Whether an equation is a kernel (`pallas_call`): one operation, whose references are its own."""
    return "grid_mapping" in params


def kernel_runs(params: dict[str, Any]) -> int:
    """How often a kernel's program runs: once for each place of its grid."""
    return math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries lead the inputs of a `scan` (jax 0.12 groups them in a tree)."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def while_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants of the condition, and then of the body, lead the inputs of a `while`; the rest is carried."""
    return params["cond_nconsts"], params["body_nconsts"]


def loop_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carries lead the inputs of a `scan` or a `while`."""
    if "body_jaxpr" in params:
        return sum(while_counts(params)), len(params["body_jaxpr"].out_avals)
    return scan_counts(params)


def without_dead_code(closed: Any) -> Any:
    """A closed jaxpr without what its results do not need, inside loops and calls too; its inputs stay."""
    return ClosedJaxpr(with_results(closed, [True] * len(bare_jaxpr(closed).outvars)), constants_of(closed))


def with_results(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """A jaxpr as an open one with some of its results, without what these do not need; its inputs stay."""
    return _partial_eval.dce_jaxpr(bare_jaxpr(jaxpr), list(wanted), instantiate=True)[0]


def open_jaxpr(closed: Any) -> Any:
    """A closed jaxpr as an open one, whose constants lead its inputs."""
    return _partial_eval.convert_constvars_jaxpr(bare_jaxpr(closed))


def outside_of_any_trace() -> bool:
    """Whether no jit, grad, vmap or scan is being traced on this thread."""
    return _core.trace_state_clean()


class JitDescription(NamedTuple):
    """What a jitted function was made with, so that it can be made again around another function.

    Attributes:
        fun: the function inside.
        options: of `jax.jit`.
        is_plain: it was given without a jit, with options beside it.
    """

    fun: Callable
    options: dict[str, Any]
    is_plain: bool = False


def is_jitted(fun: Any) -> bool:
    """Whether `fun` is the result of `jax.jit`; a bound method, which shows the attributes of its function, is not."""
    return (
        not isinstance(fun, types.MethodType)
        and hasattr(fun, "_jit_info")
        and hasattr(fun, "__wrapped__")
        and hasattr(fun, "trace")
    )


def uses_remat3() -> bool:
    """Whether `jax.checkpoint` is at present its coming implementation, behind the flag `jax_remat3`."""
    return bool(getattr(jax.config, "jax_remat3", False))


def with_known_checkpoints() -> contextlib.AbstractContextManager:
    """A context for tracing in which a user's `jax.checkpoint` is the primitive that we can enter."""
    state = getattr(_config, "remat3", None)
    return contextlib.nullcontext() if state is None else state(False)


@functools.cache
def remat3_pins_cotangents() -> bool:
    """Whether that implementation takes the cotangents through its barrier. Seen in what it makes of a function."""
    recomputing = jax.checkpoint(lambda x: jax.numpy.sin(jax.numpy.sin(x)))

    def backward(x, cotangent):
        return jax.vjp(recomputing, x)[1](cotangent)

    found = equations_in({"jaxpr": jax.make_jaxpr(backward)(1.0, 1.0)})
    return any(one.primitive is barrier_p and len(one.invars) > 1 for one in found)


@functools.cache
def _remat3_names_can_be_batched() -> bool:
    try:
        jax.make_jaxpr(jax.vmap(lambda x: checkpoint_name(x, "name")))(np.zeros(1))
    except NotImplementedError:
        return False
    return True


def can_name() -> bool:
    """Whether a `checkpoint_name` may be put on a tensor: in jax 0.10 those of `jax_remat3` know no `vmap`."""
    return not uses_remat3() or _remat3_names_can_be_batched()


def describe_jit(fun: Any) -> JitDescription:
    """Read the options of a jitted function back; JAX keeps them in a private field only."""
    info = fun._jit_info
    options: dict[str, Any] = {}
    for field in ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames"):
        if value := getattr(info, field):
            options[field] = value
    # A number and a name for the same argument say the same thing twice, and jax.jit infers one from the other.
    for kind in ("static", "donate"):
        if f"{kind}_argnums" in options and f"{kind}_argnames" in options:
            options[f"{kind}_argnames"] = tuple(options[f"{kind}_argnames"])
    for side in ("in", "out"):
        leaves = getattr(info, f"{side}_shardings_leaves")
        tree = getattr(info, f"{side}_shardings_treedef")
        if any(not is_unspecified(leaf) for leaf in leaves):
            options[f"{side}_shardings"] = jax.tree.unflatten(tree, leaves)
    for field in ("device", "backend"):
        if (value := getattr(info, field)) is not None:
            options[field] = value
    if info.keep_unused:
        options["keep_unused"] = True
    if info.compiler_options_kvs:
        options["compiler_options"] = dict(info.compiler_options_kvs)
    return JitDescription(fun.__wrapped__, options)


def is_unspecified(sharding: Any) -> bool:
    """Whether a sharding of a jit was left to the compiler."""
    return type(sharding).__name__ == "UnspecifiedValue"


def closed_over_tracers(traced: Any) -> tuple[Any, ...]:
    """Values of an outer transform that a traced function reads from its closure; they lead its jaxpr's inputs."""
    return tuple(traced._consts) if traced._num_consts else ()


def symbolic_inputs(traced: Any) -> list[str]:
    """The types of a traced function's inputs whose shapes have symbolic dimensions (`jax.export.symbolic_shape`)."""
    types = [variable.aval for variable in input_variables(traced.jaxpr)]
    return [str(aval) for aval in types if any(map(jax.export.is_symbolic_dim, getattr(aval, "shape", ())))]


def own_copy(traced: Any) -> Any:
    """JAX's record of a traced function with a jaxpr object of its own: keeping it does not keep the jaxpr object that
    JAX's caches hold, so that a weak reference to that one tells when they drop it."""
    mine = copy.copy(traced)
    mine._params = {**traced._params, "jaxpr": copy.copy(traced.jaxpr)}
    return mine


def function_of_jaxpr(traced: Any) -> Callable[..., list[Any]]:
    """The flat function that a traced function's jaxpr stands for; closed-over tracers lead its arguments."""
    return extend_core.jaxpr_as_fun(traced.jaxpr)
