"""Layouts <-> NamedSharding: where every weight, gradient, optimizer state and activation lies, and how it gets there.

Owns placing and gathering arrays. Reads mesh axes and rows from the plan only; must not know the model's equations.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from scaling_lab.backends.jax.stacks import drawn
from scaling_lab.errors import WorkerError
from scaling_lab.models.parameters import Parameter
from scaling_lab.plan.experiment import Precision
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import ParameterPlan, Plan

Arrays = dict[str, jax.Array]


@dataclass(frozen=True, eq=False)
class Placement:
    """The plan's layouts on real devices. Hashed by identity, so that compiled programs may close over it.

    rows_over, vocab_over: mesh axes over which rows, or the vocabulary, lie beside those of the table, outside a pipeline's stages
    """

    mesh: Mesh
    plan: Plan
    precision: Precision
    rows_over: tuple[str, ...] = ()
    vocab_over: tuple[str, ...] = ()

    def named(self, layout: Layout) -> NamedSharding:
        """The sharding of a layout on this mesh."""
        return NamedSharding(self.mesh, PartitionSpec(*(axes or None for axes in layout.dims)))

    @property
    def explicit(self) -> bool:
        """Whether layouts are part of types, so that an operation that could go several ways must be told where its result lies."""
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of scalars: the whole value on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of tokens and labels [accumulation, rows, sequence]."""
        rows = self.plan.rules.activation_layout(("batch", "sequence")).real(self.plan.mesh)
        return self.named(Layout(((), *rows.dims)))

    def shardings(self, column: str) -> dict[str, NamedSharding]:
        """Of every parameter in a column: `weights`, `gradients` or `optimizer`."""
        return {p.parameter.name: self.named(getattr(p, column)) for p in self.plan.parameters}

    def activation(self, axes: tuple[str | None, ...]) -> Layout:
        """The layout of an activation with these logical axes; a row that is missing is an error."""
        dims = self.plan.rules.activation_layout(axes).real(self.plan.mesh).dims
        more = {"batch": self.rows_over, "vocab": self.vocab_over}
        return Layout(tuple((*more.get(axis or "", ()), *dim) for axis, dim in zip(axes, dims, strict=True)))

    @functools.cached_property
    def outside(self) -> Placement:
        """The placement of what is computed outside a pipeline's stages: each takes a share of the rows, where they divide."""
        return dataclasses.replace(self, rows_over=self.plan.pipeline.axes) if self.plan.pipeline.spread else self

    @functools.cached_property
    def ending(self) -> Placement:
        """The placement of what follows the layers: as what precedes them, but by turns.

        By turns the last stage's microbatches are dealt with one by one, and the stages share the vocabulary, where it divides.
        """
        split = self.plan.pipeline
        if not split.by_turns:
            return self.outside
        return dataclasses.replace(self, vocab_over=split.axes) if split.vocab_spread else self

    def laid_out(self, x: jax.Array, layout: Layout) -> jax.Array:
        """An array, laid out."""
        move = jax.sharding.reshard if self.explicit else jax.lax.with_sharding_constraint
        return move(x, self.named(layout))

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """An activation, laid out as the table says for its logical axes."""
        layout = self.activation(axes)
        assert len(layout.dims) == x.ndim, (axes, x.shape)
        return self.laid_out(x, layout)

    def constrain_weight(self, x: jax.Array, name: str, column: str) -> jax.Array:
        """A tensor shaped as a parameter, or as one layer of it, laid out as a column (or `compute`) says."""
        return self.laid_out(x, self.weight_layout(name, column, x.ndim))

    def weight_layout(self, name: str, column: str, num_dims: int) -> Layout:
        """The layout of a tensor with so many dims, shaped as a parameter, or as one layer of it."""
        layout: Layout = getattr(self.planned[name], column)
        if num_dims == len(layout.dims) - 1:
            layout = self.layer_layout(name, column)
        assert len(layout.dims) == num_dims, (name, num_dims)
        return layout

    def layer_layout(self, name: str, column: str) -> Layout:
        """The layout of one layer of a stacked parameter, as a column (or `compute`) says."""
        planned = self.planned[name]
        assert planned.parameter.stacked, name
        layout: Layout = getattr(planned, column)
        return layout.drop_dim(0)

    def over_mesh(self, compute: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
        """`compute` of each device's parts of global arrays; inputs and outputs are trees of layouts, or what begins one."""
        into, out_of = jax.tree.map(lambda layout: self.named(layout).spec, (inputs, outputs))
        return jax.shard_map(compute, mesh=self.mesh, in_specs=into, out_specs=out_of, check_vma=False)

    @property
    def positions(self) -> jax.Array:
        """The position in the text of each stored token of a row, int32 [sequence]."""
        return jax.numpy.asarray(self.plan.sequence.positions, np.int32)

    @functools.cached_property
    def described(self) -> dict[str, Parameter]:
        """Every parameter of the model by name."""
        return {p.parameter.name: p.parameter for p in self.plan.parameters}

    @functools.cached_property
    def planned(self) -> dict[str, ParameterPlan]:
        """The plan of every parameter by name, with what lies over more axes here."""
        return {p.parameter.name: self._with_vocabulary(p) for p in self.plan.parameters}

    def _with_vocabulary(self, planned: ParameterPlan) -> ParameterPlan:
        """Used, and its gradients summed, in more parts."""
        if not self.vocab_over or "vocab" not in planned.parameter.axes:
            return planned
        compute, gradients = (
            Layout(
                tuple(
                    (*self.vocab_over, *d) if axis == "vocab" else d
                    for axis, d in zip(planned.parameter.axes, x.dims, strict=True)
                )
            )
            for x in (planned.compute, planned.gradients)
        )
        return dataclasses.replace(planned, compute=compute, gradients=gradients)


def place_initial(placement: Placement, seed: int) -> Arrays:
    """Initial weights; a process draws only the parts that its devices hold, each once."""
    dtype = jax.numpy.dtype(placement.precision.params)
    return {
        p.parameter.name: place(p.parameter.shape, placement.named(p.weights), dtype, drawn(placement.plan, p.parameter, seed))
        for p in placement.plan.parameters
    }


def place_values(placement: Placement, values: Mapping[str, np.ndarray]) -> Arrays:
    """Weights from global arrays that every process has. Raises WorkerError where names or shapes differ from the plan."""
    dtype = jax.numpy.dtype(placement.precision.params)
    expected = {p.parameter.name: p.parameter.shape for p in placement.plan.parameters}
    given = {name: tuple(value.shape) for name, value in values.items()}
    if given != expected:
        wrong = sorted(name for name in {*expected, *given} if expected.get(name) != given.get(name))
        raise WorkerError(f"weights differ from the model's in {', '.join(f'{n}: {given.get(n)}' for n in wrong)}")
    shardings = placement.shardings("weights")
    return {name: place(shape, shardings[name], dtype, values[name].__getitem__) for name, shape in expected.items()}


def place(
    shape: tuple[int, ...], sharding: NamedSharding, dtype: np.dtype, part: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """A global array of which this process makes only its own parts; `part` gets slices with explicit start and stop."""
    made: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def local(index: tuple[slice, ...] | None) -> np.ndarray:
        bounds = tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        if bounds not in made:
            made[bounds] = np.asarray(part(tuple(slice(*b) for b in bounds)), dtype)
        return made[bounds]

    return jax.make_array_from_callback(shape, sharding, local, dtype=dtype)


def place_batch(placement: Placement, rows: tuple[int, ...], local: np.ndarray) -> jax.Array:
    """The global [accumulation, rows, sequence] array of which this process has the given rows, in their order."""
    split = placement.plan.batch
    if local.ndim != 3 or local.shape[1] != len(rows):
        raise WorkerError(f"a batch of this process is [accumulation, {len(rows)} rows, sequence], not {list(local.shape)}")
    position = {row: place for place, row in enumerate(rows)}

    def part(index: tuple[slice, ...]) -> np.ndarray:
        first = position[index[1].start]
        return local[index[0], first : first + index[1].stop - index[1].start, index[2]]

    shape = (local.shape[0], split.microbatch, local.shape[2])
    return place(shape, placement.batch, np.dtype(np.int32), part)


def check_placed(arrays: Any, expected: Any) -> None:
    """Refuse an array that does not lie where the plan put it: JAX would copy it to all devices in every step, silently.

    arrays, expected: trees of one structure, of arrays and of their shardings.
    """
    for (path, array), planned in zip(tree_leaves_with_path(arrays), jax.tree.leaves(expected), strict=True):
        if array.sharding != planned and not array.sharding.is_equivalent_to(planned, array.ndim):
            name = keystr(path, simple=True, separator=".")
            raise WorkerError(f"{name} lies as {array.sharding}, but the plan says {planned}")


def layout_of(array: jax.Array) -> Layout:
    """The layout that an array really has, axes of size 1 left out."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding):
        raise WorkerError(f"an array of shape {array.shape} has no named layout: {sharding}")
    spec = (*sharding.spec, *(None,) * (array.ndim - len(sharding.spec)))
    dims = (() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)
    sizes = sharding.mesh.shape
    return Layout(tuple(tuple(axis for axis in dim if sizes[axis] > 1) for dim in dims))


def gather(array: jax.Array) -> np.ndarray:
    """The whole array on this host. All processes must call this together."""
    if not array.is_fully_addressable:
        sharding = array.sharding
        assert isinstance(sharding, NamedSharding)
        array = jax.jit(lambda x: x, out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))(array)
        return np.asarray(array.addressable_data(0))
    return np.asarray(array)


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """A digest of each local part, keyed `name|part`. Raises WorkerError where two devices of this process differ."""
    found: dict[str, str] = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            bounds = (s.indices(size)[:2] for s, size in zip(shard.index, array.shape, strict=True))
            key = f"{name}|{','.join(f'{start}:{stop}' for start, stop in bounds)}"
            digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            if found.setdefault(key, digest) != digest:
                raise WorkerError(f"replicas of {key} differ between devices of one process")
    return found


def local_bytes(arrays: Iterable[jax.Array]) -> int:
    """Bytes that one device of this process holds of these arrays."""
    return sum(max(shard.data.nbytes for shard in array.addressable_shards) for array in arrays)
