"""The mesh: coordinates, hosts, crossing axes, and how `auto` finds its sizes."""

import math
import re

import pytest
from experiments import FOUND, experiment
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling_lab.errors import ConfigError, PlanError
from scaling_lab.plan.experiment import MESH_AXES
from scaling_lab.plan.hosts import cut
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.plan import Found, make_plan


def mesh_of(hosts=1, **sizes):
    return Mesh(tuple((axis, sizes.get(axis, 1)) for axis in MESH_AXES), hosts)


def found_mesh(table="fsdp_tensor", mesh="auto", devices=8, **changes):
    changes = {f"mesh.{key}": value for key, value in changes.items()}
    batch = {"workload.global_batch": 240, "model.embed": 720, "model.kv_heads": 4}
    return make_plan(experiment(sharding=table, mesh=mesh, **batch, **changes), Found("cpu", devices, True, None)).mesh


def sizes(mesh):
    return {axis: size for axis, size in mesh.axes if size > 1}


def refusal(table="fsdp_tensor", mesh="auto", **changes):
    with pytest.raises(PlanError) as caught:
        found_mesh(table, mesh, **changes)
    return str(caught.value)


def test_devices_are_laid_out_row_major_the_last_axis_fastest():
    mesh = mesh_of(data=2, fsdp=3, tensor=2)
    # device 9 = 1 x (3 x 2) + 1 x 2 + 1
    assert {axis: place for axis, place in mesh.coordinates(9).items() if mesh.size(axis) > 1} == {
        "data": 1,
        "fsdp": 1,
        "tensor": 1,
    }
    assert [mesh.coordinates(d)["fsdp"] for d in range(12)] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("hosts", "crossing"),
    [
        (1, ()),
        (2, ("data",)),  # a host is fsdp 4 x tensor 2
        (4, ("data", "fsdp")),  # a host is half of fsdp with whole lines of tensor
        (8, ("data", "fsdp")),
        (16, ("data", "fsdp", "tensor")),  # a host is one device
    ],
)
def test_axes_that_cross_hosts_are_named(hosts, crossing):
    assert mesh_of(hosts, data=2, fsdp=4, tensor=2).crossing_axes() == crossing


def test_an_axis_inside_every_host_does_not_cross():
    # data 2 x fsdp 2 on 2 hosts of 2: data leads from host 0 (devices 0, 1) to host 1 (2, 3), fsdp does not
    assert mesh_of(2, data=2, fsdp=2).crossing_axes() == ("data",)


@given(st.lists(st.integers(1, 4), min_size=6, max_size=6), st.data())
@settings(max_examples=60, deadline=None)
def test_crossing_axes_are_those_with_two_hosts_on_one_line(shape, data):
    devices = math.prod(shape)
    hosts = data.draw(st.sampled_from([n for n in range(1, devices + 1) if devices % n == 0]))
    mesh = Mesh(tuple(zip(MESH_AXES, shape, strict=True)), hosts)
    lines: dict[tuple, set[int]] = {}
    for device in range(devices):
        place = mesh.coordinates(device)
        for axis in mesh.real_axes:
            line = (axis, *(place[other] for other in MESH_AXES if other != axis))
            lines.setdefault(line, set()).add(device // mesh.devices_per_host)
    assert set(mesh.crossing_axes()) == {line[0] for line, on in lines.items() if len(on) > 1}


@pytest.mark.parametrize(
    ("table", "devices", "expected"),
    [
        ("fsdp_tensor", 8, {"fsdp": 4, "tensor": 2}),
        ("fsdp_tensor", 1, {}),
        ("fsdp_tensor", 2, {"tensor": 2}),
        ("fsdp_tensor", 6, {"fsdp": 3, "tensor": 2}),
        ("fsdp_tensor", 5, {"fsdp": 5}),  # 5 has no factor 2 for tensor
        ("fsdp", 8, {"fsdp": 8}),
        ("hsdp", 8, {"fsdp": 8}),
        ("data", 8, {"data": 8}),
        ("zero1", 8, {"data": 8}),
        ("tensor", 8, {"data": 4, "tensor": 2}),
        ("single", 8, {}),
    ],
)
def test_auto_gives_two_to_tensor_and_the_rest_to_fsdp_or_data(table, devices, expected):
    assert sizes(found_mesh(table, devices=devices)) == expected


def test_mesh_devices_overrides_what_was_found():
    asked = experiment(**{"mesh.devices": 16, "workload.global_batch": 64})
    assert sizes(make_plan(asked, FOUND).mesh) == {"fsdp": 8, "tensor": 2}


def test_sizes_given_on_the_command_line_are_kept_and_the_rest_is_chosen():
    mesh = found_mesh(tensor=4)
    assert sizes(mesh) == {"fsdp": 2, "tensor": 4}
    assert "tensor" not in mesh.chosen
    assert "fsdp" in mesh.chosen
    assert sizes(found_mesh(data=2)) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_one_switches_every_table_off():
    assert sizes(found_mesh("fsdp_tensor", "one")) == {}


def test_a_fixed_mesh_may_be_larger_than_what_was_found():
    assert found_mesh("fsdp", fsdp=16).devices == 16


def test_a_size_that_does_not_divide_what_was_found_is_refused_with_a_number_that_works():
    message = refusal(tensor=3)
    assert "mesh.tensor=3: 3 does not divide 8, the devices there are without mesh.devices. Set mesh.devices=6." in message


def test_a_mesh_that_is_not_the_devices_asked_for_is_refused_and_the_advice_plans():
    asked = {"mesh.devices": 16, "workload.global_batch": 16}
    with pytest.raises(PlanError, match=r"mesh `data2_fsdp4` is data 2 x fsdp 4 = 8 devices, but mesh\.devices=16"):
        make_plan(experiment(sharding="hsdp", mesh="data2_fsdp4", **asked), FOUND)
    assert make_plan(experiment(sharding="hsdp", mesh="data2_fsdp4", **{"mesh.devices": 8}), FOUND).mesh.devices == 8


def test_devices_per_host_times_hosts_asks_for_devices():
    assert sizes(found_mesh(devices_per_host=8, hosts=3)) == {"fsdp": 12, "tensor": 2}
    message = refusal("hsdp", "data2_fsdp4", devices_per_host=3, hosts=2)
    assert (
        "= 8 devices, but mesh.hosts=2 x mesh.devices_per_host=3 = 6. Set mesh.devices=8 mesh.devices_per_host=null" in message
    )
    with pytest.raises(PlanError, match=r"mesh\.hosts=1 x mesh\.devices_per_host=4 is 4 devices, but mesh\.devices=8"):
        make_plan(experiment(**{"mesh.devices": 8, "mesh.hosts": 1, "mesh.devices_per_host": 4}), FOUND)


@pytest.mark.parametrize(
    ("hardware", "keys", "hosts"),
    [
        ("this", {}, 1),
        ("this", {"devices": 16}, 1),
        ("this", {"devices": 16, "devices_per_host": 8}, 2),
        ("this", {"devices_per_host": 4}, 2),  # of the 8 that are found
        ("this", {"hosts": 4}, 4),
        ("h100_sxm", {"devices": 4}, 1),
        ("h100_sxm", {"devices": 12}, 2),  # 12 / 8 rounded up: two hosts of 6
        ("h100_sxm", {"devices": 16}, 2),
        ("h100_sxm", {"devices": 16, "hosts": 1}, 1),
        ("h100_sxm", {"devices": 16, "devices_per_host": 4}, 4),
        ("tpu_v6e", {"devices": 16}, 1),  # what a host of it has is not known
    ],
)
def test_hosts_left_open_are_those_that_the_devices_fill(hardware, keys, hosts):
    wide = {"workload.global_batch": 240, "model.embed": 720, "model.kv_heads": 4}
    asked = experiment(hardware=hardware, **wide, **{f"mesh.{key}": value for key, value in keys.items()})
    assert make_plan(asked, Found("gpu", 8, False, None)).mesh.hosts == hosts


def test_hosts_of_the_hardware_that_would_be_unequal_are_refused_with_more_of_them():
    asked = {"mesh.devices": 20, "workload.global_batch": 240, "model.embed": 720, "model.kv_heads": 4}
    with pytest.raises(PlanError) as caught:
        make_plan(experiment(hardware="h100_sxm", **asked), Found("gpu", 20, False, None))
    # 20 / 8 rounded up is 3, which does not divide 20; 2 hosts would be of 10
    assert str(caught.value) == (
        "mesh.hosts=3 (mesh.hosts=null: 20 devices / hardware.devices_per_host=8) cannot share 20 devices evenly "
        "(fsdp 10 x tensor 2). Set mesh.hosts=5."
    )
    found = make_plan(experiment(hardware="h100_sxm", **asked, **{"mesh.hosts": 5}), Found("gpu", 20, False, None))
    assert found.mesh.devices_per_host == 4


@pytest.mark.parametrize("devices_per_host", [3, 5, 7, 16])
def test_devices_per_host_that_cut_the_mesh_unevenly_are_refused_with_numbers_that_do_not(devices_per_host):
    message = refusal(devices_per_host=devices_per_host)
    assert f"mesh.devices_per_host={devices_per_host} does not cut fsdp 4 x tensor 2 = 8 (innermost last)" in message
    for near in re.findall(r"Set .*", message)[0].removeprefix("Set ").removesuffix(".").split(" or "):
        size = int(near.removeprefix("mesh.devices_per_host="))
        assert found_mesh(devices_per_host=size).devices_per_host == size


def test_hosts_that_cannot_share_the_devices_are_refused_with_hosts_that_can():
    message = refusal(hosts=3)
    assert "mesh.hosts=3 cannot share 8 devices evenly (fsdp 4 x tensor 2). Set mesh.hosts=2 or mesh.hosts=4." in message
    for hosts in (2, 4):
        assert found_mesh(hosts=hosts).hosts == hosts


def test_hosts_that_cut_an_axis_raggedly_are_refused_with_hosts_that_do_not():
    # data 3 x fsdp 4 on 2 hosts of 6: a host would hold one and a half lines of fsdp
    message = refusal("hsdp", data=3, fsdp=4, hosts=2)
    assert "mesh.hosts=2: hosts of 6 devices cut axis fsdp raggedly" in message
    assert "Set mesh.hosts=1 or mesh.hosts=3." in message
    for hosts in (1, 3):
        assert found_mesh("hsdp", data=3, fsdp=4, hosts=hosts).hosts == hosts
    # data 2 x fsdp 6 on 3 hosts of 4: two thirds of a line
    assert "cut axis fsdp raggedly" in refusal("hsdp", data=2, fsdp=6, hosts=3)


@given(st.lists(st.integers(1, 4), min_size=6, max_size=6), st.integers(1, 64))
@settings(max_examples=80, deadline=None)
def test_an_accepted_cut_gives_every_host_the_same_box_of_the_mesh(shape, hosts):
    mesh = Mesh(tuple(zip(MESH_AXES, shape, strict=True)), 1)
    try:
        mesh = cut(experiment(**{"mesh.hosts": hosts}).mesh, mesh, None)
    except PlanError:
        return
    for host in range(hosts):
        held = range(host * mesh.devices_per_host, (host + 1) * mesh.devices_per_host)
        places = [tuple(mesh.coordinates(device).values()) for device in held]
        box = [len({place[i] for place in places}) for i in range(6)]
        assert math.prod(box) == len(places)


def test_an_order_that_lacks_or_repeats_an_axis_is_refused():
    with pytest.raises(ConfigError, match=r"mesh\.order=\[data\] must list each of pipeline, data"):
        make_plan(experiment(**{"mesh.order": ["data"]}), FOUND)
    with pytest.raises(ConfigError, match="must list each"):
        make_plan(experiment(**{"mesh.order": [*MESH_AXES, "data"]}), FOUND)


def test_order_changes_where_an_axis_lies_and_not_its_size():
    order = ["tensor", "pipeline", "data", "expert", "fsdp", "context"]
    found = make_plan(experiment(**{"mesh.order": order, "mesh.hosts": 2}), FOUND).mesh
    assert sizes(found) == {"tensor": 2, "fsdp": 4}
    assert found.crossing_axes() == ("tensor",)
