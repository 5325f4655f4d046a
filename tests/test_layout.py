"""One layout, two readings: per dim which mesh axes, per mesh axis which dim; and the parts that they give."""

import math

import numpy as np
from experiments import FOUND, experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_lab.plan.batch import BatchSplit
from scaling_lab.plan.experiment import MESH_AXES
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.plan import make_plan

MESH = Mesh((("data", 2), ("fsdp", 4), ("tensor", 2)), 1)


def test_the_parts_of_a_dim_over_two_axes_are_numbered_outermost_first():
    layout = Layout((("data", "tensor"), ()))
    assert layout.local_shape((8, 3), MESH) == (2, 3)
    # part = data x 2 + tensor: (1, 0) is part 2, rows 4 and 5
    assert layout.local_slices((8, 3), MESH, {"data": 1, "fsdp": 3, "tensor": 0}) == (slice(4, 6), slice(0, 3))


def test_the_two_readings_of_a_known_layout():
    layout = Layout(((), ("fsdp",), ("tensor",), ()))  # (layers, embed, heads, head_dim)
    assert [layout.dim_of(axis) for axis in ("data", "fsdp", "tensor")] == [None, 1, 2]
    assert layout.axes == ("fsdp", "tensor")
    assert layout.without(("fsdp",)) == Layout(((), (), ("tensor",), ()))
    assert layout.drop_dim(0) == Layout((("fsdp",), ("tensor",), ()))


def test_axes_of_size_1_are_left_out_of_the_real_layout():
    mesh = Mesh((("fsdp", 1), ("tensor", 2)), 1)
    assert Layout((("fsdp",), ("fsdp", "tensor"))).real(mesh) == Layout(((), ("tensor",)))


@st.composite
def layouts(draw):
    """A mesh, a layout on it in mesh order with no axis twice, and a shape that divides."""
    mesh = Mesh(tuple((axis, draw(st.integers(1, 3))) for axis in MESH_AXES), 1)
    dims = draw(st.integers(1, 3))
    place = {axis: draw(st.integers(-1, dims - 1)) for axis in MESH_AXES}
    layout = Layout(tuple(tuple(axis for axis in MESH_AXES if place[axis] == dim) for dim in range(dims)))
    shape = tuple(mesh.split(axes) * draw(st.integers(1, 2)) for axes in layout.dims)
    return mesh, layout, shape


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_local_parts_over_all_devices_tile_the_tensor_evenly(case):
    mesh, layout, shape = case
    held = np.zeros(shape, int)
    for device in range(mesh.devices):
        part = layout.local_slices(shape, mesh, mesh.coordinates(device))
        assert tuple(s.stop - s.start for s in part) == layout.local_shape(shape, mesh)
        held[part] += 1
    # every element lies on as many devices as there are copies: devices / parts
    assert (held == mesh.devices // mesh.split(layout.axes)).all()


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_the_two_readings_are_transposes(case):
    mesh, layout, _ = case
    per_axis = {axis: layout.dim_of(axis) for axis in mesh.names}
    assert tuple(tuple(axis for axis in mesh.names if per_axis[axis] == dim) for dim in range(len(layout.dims))) == layout.dims
    assert {axis for axis in mesh.names if per_axis[axis] is not None} == set(layout.axes)


@given(layouts())
@settings(max_examples=40, deadline=None)
def test_devices_that_share_their_place_on_the_layouts_axes_hold_the_same_part(case):
    mesh, layout, shape = case
    parts: dict[tuple, tuple] = {}
    for device in range(mesh.devices):
        place = mesh.coordinates(device)
        key = tuple(place[axis] for axis in layout.axes)
        part = layout.local_slices(shape, mesh, place)
        assert parts.setdefault(key, part) == part
    assert len(set(map(str, parts.values()))) == mesh.split(layout.axes)


def test_rows_of_a_device_are_those_that_the_layout_of_the_batch_gives_it():
    plan = make_plan(experiment(mesh="data2_fsdp2_tensor2", **{"workload.accumulation": 2}), FOUND)
    assert plan.batch == BatchSplit(("data", "fsdp"), 4, 2, 8)
    layout = plan.rules.activation_layout(("batch",)).real(plan.mesh)
    for device in range(8):
        (rows,) = layout.local_slices((8,), plan.mesh, plan.mesh.coordinates(device))
        assert list(plan.batch.rows(plan.mesh, device)) == list(range(rows.start, rows.stop))
    # device 5 is data 1, fsdp 0, tensor 1: part 1 x 2 + 0 = 2 of 4, rows 4 and 5 of 8
    assert list(plan.batch.rows(plan.mesh, 5)) == [4, 5]


@given(layouts(), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_every_row_is_computed_equally_often(case, rows):
    mesh, layout, _ = case
    axes = tuple(axis for axis in layout.dims[0] if mesh.size(axis) > 1)
    split = BatchSplit(axes, mesh.split(axes), 1, rows * mesh.split(axes))
    counts = np.bincount([row for device in range(mesh.devices) for row in split.rows(mesh, device)])
    assert len(counts) == split.microbatch
    assert math.prod(mesh.shape) * rows == counts.sum()
    assert len(set(counts)) == 1
