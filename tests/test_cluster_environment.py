"""What a worker's environment becomes: the plan's needs merged with what the user has set."""

import os
import subprocess
import sys
from importlib import metadata

import pytest
from experiments import FOUND, experiment

from scaling_lab.cluster.environment import CPU_FUSION, conflicts, worker_environment
from scaling_lab.plan.plan import make_plan

COUNT = "--xla_force_host_platform_device_count"


def merged(present, **keys):
    asked = experiment(**keys)
    return worker_environment(asked, make_plan(asked, FOUND), present)


def said(present, **keys):
    asked = experiment(**keys)
    return conflicts(asked, make_plan(asked, FOUND), present)


def test_jax_gets_its_simulated_devices_and_its_platform_named():
    environment = merged({})
    assert f"{COUNT}=8" in environment["XLA_FLAGS"].split()
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_simulated_hosts_share_the_devices():
    assert f"{COUNT}=4" in merged({}, **{"mesh.hosts": 2})["XLA_FLAGS"].split()


def test_other_xla_flags_of_the_user_survive():
    flags = merged({"XLA_FLAGS": "--xla_dump_to=dump  --xla_dump_hlo_as_text"})["XLA_FLAGS"].split()
    assert "--xla_dump_to=dump" in flags
    assert "--xla_dump_hlo_as_text" in flags
    assert said({"XLA_FLAGS": "--xla_dump_to=dump --xla_dump_hlo_as_text"}) == []


def test_the_users_xla_flag_comes_after_the_configs_and_wins_and_this_is_said():
    present = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    keys = {"backend.xla_flags": ["--xla_cpu_enable_fast_math=false", "--xla_dump_to=here"]}
    flags = merged(present, **keys)["XLA_FLAGS"].split()
    assert "--xla_cpu_enable_fast_math=true" in flags
    assert "--xla_cpu_enable_fast_math=false" not in flags
    assert "--xla_dump_to=here" in flags
    assert said(present, **keys) == [
        "--xla_cpu_enable_fast_math=false (backend.xla_flags) is overridden by --xla_cpu_enable_fast_math=true "
        "(XLA_FLAGS in the environment)"
    ]


def test_the_number_of_devices_is_the_plans_and_a_conflict_is_said():
    present = {"XLA_FLAGS": f"{COUNT}=2 --xla_dump_to=dump"}
    flags = merged(present)["XLA_FLAGS"].split()
    assert [flag for flag in flags if flag.startswith(COUNT)] == [f"{COUNT}=8"]
    assert "--xla_dump_to=dump" in flags
    assert said(present) == [f"{COUNT}=2 (XLA_FLAGS in the environment) is overridden by {COUNT}=8 (the plan)"]


def test_a_quoted_xla_flag_is_passed_on_as_it_was_written():
    text = "--xla_dump_to='two words' --xla_dump_hlo_pass_re=.*"
    assert text in merged({"XLA_FLAGS": text})["XLA_FLAGS"]


def test_xla_flags_may_name_a_file_as_xla_allows(tmp_path):
    (tmp_path / "flags").write_text("--xla_dump_to=dump\n--xla_dump_hlo_as_text\n")
    flags = merged({"XLA_FLAGS": str(tmp_path / "flags")})["XLA_FLAGS"].split()
    assert {"--xla_dump_to=dump", "--xla_dump_hlo_as_text", f"{COUNT}=8"} <= set(flags)


def test_a_platform_in_the_users_environment_yields_to_the_plans_and_this_is_said():
    assert merged({"JAX_PLATFORMS": "cuda"})["JAX_PLATFORMS"] == "cpu"
    assert said({"JAX_PLATFORMS": "cuda"}) == ["JAX_PLATFORMS=cuda in the environment is overridden: the plan needs 'cpu'"]


def test_torch_shares_the_cores_among_its_processes():
    cores = len(os.sched_getaffinity(0))
    environment = merged({}, backend="torch", **{"mesh.devices": 4})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(max(1, cores // 4))
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "XLA_FLAGS" not in environment


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "GLIBC_TUNABLES"])
def test_what_the_user_set_is_left_alone(name):
    assert name not in merged({name: "3"}, backend="torch")


def test_the_configs_environment_has_the_last_word():
    keys = {"backend.environment": {"OMP_NUM_THREADS": "5", "JAX_PLATFORMS": "tpu"}}
    assert merged({"OMP_NUM_THREADS": "3"}, **keys)["OMP_NUM_THREADS"] == "5"
    assert merged({}, **keys)["JAX_PLATFORMS"] == "tpu"
    assert said({"OMP_NUM_THREADS": "3"}, **keys) == [
        "OMP_NUM_THREADS=3 in the environment is overridden by backend.environment: '5'"
    ]


def test_a_flag_that_could_abort_another_version_is_given_only_to_the_one_it_was_tried_with():
    assert (CPU_FUSION in merged({})["XLA_FLAGS"]) == metadata.version("jaxlib").startswith("0.10.")


def test_jax_accepts_these_flags_and_has_the_planned_devices():
    environment = {**os.environ, **merged(dict(os.environ), **{"mesh.devices": 4})}
    code = "import jax; print(len(jax.devices()), jax.numpy.ones(3).sum())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["4", "3.0"]


def test_the_loopback_is_reached_without_the_users_proxy():
    assert "no_proxy" not in merged({})
    assert merged({"http_proxy": "http://10.0.0.1:3128"})["no_proxy"] == "127.0.0.1,localhost"
    both = merged({"https_proxy": "http://10.0.0.1:3128", "NO_PROXY": "intranet,localhost"})
    assert both["NO_PROXY"] == "intranet,localhost,127.0.0.1"
