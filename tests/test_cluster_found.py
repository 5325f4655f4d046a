"""What the lab finds on a machine, on made-up roots of a file system and on this one."""

from pathlib import Path

import psutil
import pytest
from experiments import experiment

from scaling_lab.cluster.folders import cache_folder
from scaling_lab.cluster.found import find, host_memory_bytes, visible_gpus
from scaling_lab.errors import PlanError

GIB = 2**30


def machine(
    root: Path, gpus: int = 0, tpus: tuple[str, ...] = (), memory_kb: int = 16 * 2**20, limit: str | None = None
) -> Path:
    (root / "dev").mkdir(parents=True)
    for index in range(gpus):
        (root / f"dev/nvidia{index}").touch()
    if gpus:
        (root / "dev/nvidiactl").touch()
        (root / "dev/nvidia-uvm").touch()
    for index, device in enumerate(tpus):
        folder = root / f"sys/bus/pci/devices/0000:00:{index:02d}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text("0x1ae0\n")
        (folder / "device").write_text(f"{device}\n")
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal:       {memory_kb} kB\nMemFree: 1 kB\n")
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
    return root


def test_a_processor_simulates_eight_devices_that_share_its_memory(tmp_path):
    found = find(experiment(), machine(tmp_path), {})
    assert (found.platform, found.devices, found.simulated) == ("cpu", 8, True)
    assert found.memory_bytes_per_device == 16 * GIB // 8


@pytest.mark.parametrize(
    ("keys", "devices"),
    [({"mesh.devices": 4}, 4), ({"mesh.devices": 16}, 16), ({"mesh.fsdp": 16, "mesh.tensor": 1}, 16)],
)
def test_the_memory_is_shared_by_as_many_devices_as_the_mesh_will_have(tmp_path, keys, devices):
    assert find(experiment(**keys), machine(tmp_path), {}).memory_bytes_per_device == 16 * GIB // devices


def test_one_device_has_the_processor_to_itself_and_is_not_simulated(tmp_path):
    sizes = {f"mesh.{axis}": 1 for axis in ("pipeline", "data", "expert", "fsdp", "context", "tensor")}
    found = find(experiment(**sizes), machine(tmp_path), {})
    assert not found.simulated
    assert found.memory_bytes_per_device == 16 * GIB


def test_a_container_has_the_memory_of_its_control_group(tmp_path):
    assert host_memory_bytes(machine(tmp_path, limit=str(4 * GIB))) == 4 * GIB


def test_a_control_group_without_a_limit_has_the_machines_memory(tmp_path):
    assert host_memory_bytes(machine(tmp_path, limit="max")) == 16 * GIB


def test_this_machines_memory_is_what_psutil_says_or_less():
    assert 0 < host_memory_bytes() <= psutil.virtual_memory().total


def test_memory_given_in_the_config_wins(tmp_path):
    assert find(experiment(**{"hardware.memory_gib": 3.0}), machine(tmp_path), {}).memory_bytes_per_device == 3 * GIB


def test_gpus_are_found_and_real(tmp_path):
    found = find(experiment(**{"hardware.memory_gib": 80.0}), machine(tmp_path, gpus=4), {})
    assert (found.platform, found.devices, found.simulated) == ("gpu", 4, False)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ("0", "1", "2", "3")),
        ("2,3", ("2", "3")),
        ("", ()),
        ("-1", ()),
        ("1, 7, 2", ("1",)),
        ("GPU-8932f937", ("GPU-8932f937",)),
        ("MIG-a,MIG-b", ("MIG-a", "MIG-b")),
    ],
)
def test_cuda_visible_devices_narrows_the_gpus_as_cuda_reads_it(tmp_path, named, expected):
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert visible_gpus(machine(tmp_path, gpus=4), environment) == expected


def test_hidden_gpus_leave_the_processor(tmp_path):
    assert find(experiment(), machine(tmp_path, gpus=4), {"CUDA_VISIBLE_DEVICES": ""}).platform == "cpu"


def test_the_processor_can_be_asked_for_where_there_are_gpus(tmp_path):
    assert find(experiment(**{"hardware.platform": "cpu"}), machine(tmp_path, gpus=4), {}).platform == "cpu"


def test_tpu_chips_are_counted_by_their_devices(tmp_path):
    found = find(
        experiment(), machine(tmp_path, tpus=("0x0063",) * 4 + ("0x0042",)), {}
    )  # v5e; 0x0042 is Google's network card
    assert (found.platform, found.devices) == ("tpu", 4)


def test_an_ironwood_chip_has_two_devices(tmp_path):
    assert find(experiment(), machine(tmp_path, tpus=("0x0076",) * 4), {}).devices == 8


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_a_platform_that_is_asked_for_and_not_here_is_refused(tmp_path, platform):
    with pytest.raises(PlanError, match=f"hardware.platform={platform} .*was found on this machine. Set hardware=this"):
        find(experiment(**{"hardware.platform": platform}), machine(tmp_path), {})


def test_more_real_devices_than_there_are_is_refused(tmp_path):
    with pytest.raises(PlanError, match="the mesh has 8 devices, but this machine has 4 of platform gpu"):
        find(experiment(**{"mesh.devices": 8}), machine(tmp_path, gpus=4), {})


@pytest.mark.parametrize("keys", [{"mesh.order": ["fsdp"]}, {"mesh.devices": 7, "mesh.fsdp": 2}])
def test_a_wrong_config_is_left_for_the_plan_to_refuse(tmp_path, keys):
    assert find(experiment(**keys), machine(tmp_path), {}).devices == 8


def test_the_cache_folder_is_the_labs_own_variable_or_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SCALING_LAB_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("SCALING_LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "scaling_lab"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/scaling_lab"
