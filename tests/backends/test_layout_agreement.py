"""Random layouts: the parts that JAX and DTensor give each device are those of `plan.layout`, and a table's reading is one fact."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from scaling_lab.plan.experiment import MESH_AXES
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh

pytestmark = pytest.mark.xdist_group("jax_llama")


@st.composite
def layouts(draw):
    """A mesh of up to 8 devices over all six axes, a layout on it with no axis twice, and a shape that divides."""
    sizes, left = [], 8
    for _ in MESH_AXES:
        size = draw(st.sampled_from([n for n in (1, 2, 4) if left % n == 0]))
        sizes.append(size)
        left //= size
    mesh = Mesh(tuple(zip(MESH_AXES, draw(st.permutations(sizes)), strict=True)), 1)
    dims = draw(st.integers(1, 3))
    place = {axis: draw(st.integers(-1, dims - 1)) for axis in MESH_AXES}
    layout = Layout(tuple(tuple(axis for axis in MESH_AXES if place[axis] == dim) for dim in range(dims)))
    return mesh, layout, tuple(mesh.split(axes) * draw(st.integers(1, 3)) for axes in layout.dims)


@given(layouts())
@settings(max_examples=80, deadline=None)
def test_jax_gives_each_device_the_part_that_the_layout_says(case):
    mesh, layout, shape = case
    devices = np.array(jax.devices()[: mesh.devices], dtype=object).reshape(mesh.shape)
    named = NamedSharding(
        jax.sharding.Mesh(devices, mesh.names, axis_types=(AxisType.Auto,) * len(mesh.names)),
        PartitionSpec(*(axes or None for axes in layout.dims)),
    )
    assert named.shard_shape(shape) == layout.local_shape(shape, mesh)
    parts = named.devices_indices_map(shape)
    for index, device in enumerate(devices.flat):
        ours = layout.local_slices(shape, mesh, mesh.coordinates(index))
        theirs = tuple(slice(*s.indices(n)[:2]) for s, n in zip(parts[device], shape, strict=True))
        assert theirs == ours


@given(layouts())
@settings(max_examples=80, deadline=None)
def test_dtensor_gives_each_device_the_part_that_the_layout_says(case):
    mesh, layout, shape = case
    placements = [Replicate() if (dim := layout.dim_of(axis)) is None else Shard(dim) for axis in mesh.names]
    for index in range(mesh.devices):
        place = mesh.coordinates(index)
        local, start = _compute_local_shape_and_global_offset(shape, mesh.shape, list(place.values()), placements)
        ours = layout.local_slices(shape, mesh, place)
        assert tuple(slice(s, s + n) for s, n in zip(start, local, strict=True)) == ours


@given(layouts())
@settings(max_examples=80, deadline=None)
def test_gathering_some_axes_leaves_the_layout_of_the_others(case):
    mesh, layout, shape = case
    gathered = layout.without(layout.dims[0])
    assert gathered.dims == ((), *layout.dims[1:])
    part, whole = (math.prod(x.local_shape(shape, mesh)) for x in (layout, gathered))
    assert whole == part * mesh.split(layout.dims[0])
