"""Every shipped preset: its header, its name, that Hydra composes it, and that it plans."""

import functools
import itertools
import re
import shlex
from typing import Any

import pytest
from experiments import CONF, GROUPS, experiment, plain
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from scaling_lab.config import experiment_from
from scaling_lab.plan.experiment import MESH_AXES
from scaling_lab.plan.plan import Found, Plan, make_plan

PRESETS = sorted(f"{path.parent.name}/{path.stem}" for path in CONF.glob("*/*.yaml"))
EXPERIMENTS = [preset for preset in PRESETS if preset.startswith("experiment/")]

#: What a preset needs beside itself in order to plan on 8 devices.
NEEDS = {
    "model/tiny_gpt2": ["workload.sequence=64"],
    "model/gpt2_124m": ["sharding=fsdp"],  # 50257 divides over no tensor axis
    "mesh/data8": ["sharding=data"],
    "mesh/data4_tensor2": ["sharding=tensor"],
}


@functools.cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("config", list(overrides), return_hydra_config=True)


def groups(config: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(OmegaConf.masked_copy(config, list(GROUPS)), resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}


def planned(config: DictConfig) -> Plan:
    """The plan on what the hardware preset describes; a machine's memory is not asked, since presets must plan anywhere."""
    asked = experiment_from(groups(config))
    hardware = asked.hardware
    memory = None if hardware.memory_gib is None else int(hardware.memory_gib * 2**30)
    return make_plan(asked, Found("cpu" if hardware.platform == "auto" else hardware.platform, 8, True, memory))


def jobs(*overrides: str) -> list[list[str]]:
    """The jobs of a command: the sweep of its experiment, if it has one, and lists with commas on the command line."""
    single = [override for override in overrides if "," not in override or "[" in override]
    swept = dict(composed(*single).hydra.sweeper.get("params") or {})
    swept |= dict(override.split("=", 1) for override in overrides if override not in single)
    choices = [[f"{key}={value}" for value in str(values).split(",")] for key, values in swept.items()]
    return [[*single, *job] for job in itertools.product(*choices)]


def header(preset: str) -> list[str]:
    lines = (CONF / f"{preset}.yaml").read_text().splitlines()
    return [line for line in itertools.takewhile(lambda line: line.startswith("#"), lines) if "@package" not in line]


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset not in EXPERIMENTS])
def test_every_preset_composes_and_plans(preset):
    plan = planned(composed(preset.replace("/", "="), *NEEDS.get(preset, [])))
    assert plan.bytes_per_device["total"] > 0


@pytest.mark.parametrize("preset", EXPERIMENTS)
def test_every_experiment_composes_and_each_of_its_jobs_plans(preset):
    for overrides in jobs(preset.replace("/", "=")):
        assert planned(composed(*overrides)).mesh.devices in (1, 8)


@pytest.mark.parametrize("preset", ["config", *PRESETS])
def test_the_first_lines_say_what_for_the_command_and_what_to_expect(preset):
    lines = header(preset)
    starts = [re.match(r"# (For|Command|Expect): \S", line) for line in lines]
    assert [match[1] for match in starts if match] == ["For", "Command", "Expect"], lines
    assert all(len(line) <= 128 for line in (CONF / f"{preset}.yaml").read_text().splitlines())


@pytest.mark.parametrize("preset", PRESETS)
def test_the_command_of_every_header_composes_and_plans(preset):
    text = "\n".join(line.lstrip("#") for line in header(preset))
    command = re.split(r"\s{4,}\(|\n Expect", text[text.index("Command: ") + 9 :].replace("\\\n", ""))[0]
    words = shlex.split(command)
    assert words[:2] in (["scaling-lab", "run"], ["scaling-lab", "draw"])
    overrides = [word for word in words[2:] if word != "-m"]
    group, name = preset.split("/")
    assert any(word.startswith(f"{group}={name}") for word in overrides) or name == "default", "the command shows the preset"
    found = jobs(*overrides)
    assert (len(found) > 1) == ("-m" in words), "a sweep needs -m, and nothing else does"
    for job in found:
        planned(composed(*job))


@pytest.mark.parametrize(
    "preset", [p for p in PRESETS if p.split("/")[0] in ("model", "mesh", "sharding", "workload", "hardware")]
)
def test_a_preset_is_called_as_its_file(preset):
    group, name = preset.split("/")
    assert plain(**{group: name})[group]["name"] == name


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset.startswith("mesh/")])
def test_every_mesh_file_lists_every_axis(preset):
    mesh = plain(mesh=preset.split("/")[1])["mesh"]
    assert set(MESH_AXES) <= set(mesh)
    assert sorted(mesh["order"]) == sorted(MESH_AXES)


def test_a_mesh_is_called_as_its_axes():
    for preset in (p.split("/")[1] for p in PRESETS if p.startswith("mesh/")):
        if preset not in ("auto", "one"):
            sizes = {axis: size for axis, size in plain(mesh=preset)["mesh"].items() if axis in MESH_AXES and size > 1}
            assert "_".join(f"{axis}{size}" for axis, size in sizes.items()) == preset


@pytest.mark.parametrize("table", [preset.split("/")[1] for preset in PRESETS if preset.startswith("sharding/")])
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("model", ["tiny", "tiny_gpt2"])
def test_every_table_plans_for_both_models_and_backends_on_its_automatic_mesh(table, backend, model):
    asked = experiment(sharding=table, backend=backend, model=model, **{"workload.sequence": 64})
    plan = make_plan(asked, Found("cpu", 8, True, None))
    assert plan.mesh.devices == (1 if table == "single" else 8)


def test_the_main_job_is_fsdp_4_x_tensor_2():
    plan = planned(composed())
    assert {axis: size for axis, size in plan.mesh.axes if size > 1} == {"fsdp": 4, "tensor": 2}


def test_hydra_and_the_loader_of_the_tests_compose_the_same():
    assert groups(composed()) == plain()
    choices = {"model": "llama3_8b", "sharding": "hsdp", "mesh": "data2_fsdp4", "hardware": "tpu_v7"}
    assert groups(composed(*(f"{group}={name}" for group, name in choices.items()))) == plain(**choices)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset.startswith("hardware/")])
def test_every_number_of_hardware_has_its_source_beside_it(preset):
    for line in (CONF / f"{preset}.yaml").read_text().splitlines():
        if re.match(r"\w+: [0-9.]+", line):
            assert re.search(r"# \S", line), line


def test_accelerators_are_ordered_as_their_makers_order_them():
    a100, h100, b200 = (experiment(hardware=name).hardware for name in ("a100_80g", "h100_sxm", "b200"))
    for field in ("memory_gb_per_s", "peak_bf16_tflops", "link_gb_per_s"):
        assert getattr(a100, field) < getattr(h100, field) < getattr(b200, field)
    # half a chip: 2307 / 2 TFLOP/s, 7380 / 2 GB/s, 192 / 2 GiB
    half = experiment(hardware="tpu_v7").hardware
    assert (half.peak_bf16_tflops, half.memory_gb_per_s, half.memory_gib) == (1153.5, 3690.0, 96.0)
