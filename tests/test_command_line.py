"""The command line as a user types it, in real processes: exit codes, one message, no traceback."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from finished_runs import run_folder


def scaling_lab(*arguments: str, cwd, timeout: float = 120):
    command = [sys.executable, "-m", "scaling_lab", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], ["rnu", "did you mean run?"]),
        (["draw", "modle=tiny"], ["modle", "did you mean model?"]),
        (["draw", "model=tinny"], ["model=tinny", "did you mean tiny?"]),
        (["draw", "model.layrs=3"], ["model.layrs", "did you mean model.layers?"]),
        (["draw", "+model.layrs=3"], ["model.layrs", "did you mean layers?"]),
        (["draw", "workload.steps=many"], ["workload.steps='many'", "valid integer"]),
        (["draw", "workload.remat=ful"], ["workload.remat='ful'", "did you mean full?"]),
        (["draw", "model.layers=0"], ["model.layers=0", "greater than or equal to 1"]),
        (["draw", "model.layers"], ["model.layers", "KEY=VALUE"]),
        (["draw", "hydra/launcher=jblib"], ["hydra/launcher=jblib", "no such choice"]),
        (["draw", "sharding.weights.embed=[fsdq]"], ["sharding.weights.embed", "did you mean fsdp?"]),
        (["draw", "model=null"], ["GROUP=NAME"]),
        (["draw", "model=[1,2]"], ["model=[1,2]"]),
        (["draw", "model.name=${nope}"], ["model.name", "nope"]),
        (["draw", "sharding.weights.embd=[fsdp]"], ["did you mean sharding.weights.embed?"]),
        (["draw", "backend=tensorflow"], ["backend=tensorflow", "(one of jax, torch)"]),
        (["draw", "hydra.run.dir=/proc/nowhere"], ["/proc/nowhere"]),
        (["run", "hydra.run.dir=/proc/nowhere"], ["/proc/nowhere"]),
        (["draw", "experiment=catalogue"], ["a sweep over sharding=single,", "add -m"]),
        (["draw", "backend.environment=[a]"], ["backend.environment"]),
        (["draw", "backend.environment={FOO: bar}"], ["Write +backend.environment.FOO=bar"]),
        (["draw", "backend.environment.FOO=bar"], ["Write +backend.environment.FOO=bar"]),
        (["draw", "+backend.environment.FOO=1"], ["must be a valid string", """write '+backend.environment.FOO="1"'"""]),
        (["draw", "backend.xla_flags=[--xla_x=1]"], ["needs quotes", """Write 'backend.xla_flags=["--xla_x=1"]'"""]),
        (["draw", "data=text"], ["data.path is missing", "set data.path=PATH"]),
        (["draw", "data.path=here"], ["data.source=stdlib has no use for it", "or choose data=text"]),
        (["draw", "data=text", "data.path=gone.txt"], ["gone.txt: no such file or folder"]),
        (["draw", "data=tokens", "data.path=gone.bin"], ["gone.bin: no such file"]),
        (["draw", "data=synthetic", "data.validation_fraction=0"], ["no validation split", "workload.evaluation.every=0"]),
        (["show"], ["needs the path"]),
        (["show", "no/such/run"], ["no/such/run"]),
    ],
)
def test_a_wrong_request_is_one_message_and_exit_code_2(tmp_path, arguments, words):
    done = scaling_lab(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr
    assert done.stderr.count("scaling-lab:") == 1
    assert list(tmp_path.iterdir()) == [], "a wrong request that starts nothing leaves nothing behind"


def test_the_ways_of_writing_variables_and_flags_that_messages_and_readme_show_are_understood(tmp_path):
    asked = ['+backend.environment.OMP_NUM_THREADS="2"', "+backend.environment.FOO=bar", 'backend.xla_flags=["--xla_x=1"]']
    done = scaling_lab("draw", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert asked[0] in readme
    assert """'backend.xla_flags=["--xla_""" in readme


def test_an_infeasible_request_exits_2_and_names_both_numbers_and_the_key(tmp_path):
    done = scaling_lab("draw", "model.vocab=257", cwd=tmp_path)
    assert done.returncode == 2
    assert "vocab 257 over 2" in done.stderr
    assert "model.vocab=258" in done.stderr
    assert "Traceback" not in done.stderr


def test_draw_shows_the_mesh_the_roles_and_the_bytes_and_starts_nothing(tmp_path):
    done = scaling_lab("draw", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("fsdp", "tensor parallel", "853,120", "simulated"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hardware", ["h100_sxm", "tpu_v5p"])
def test_draw_plans_for_hardware_that_is_not_here(tmp_path, hardware):
    done = scaling_lab("draw", f"hardware={hardware}", "mesh.devices=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fsdp 7" in done.stdout
    assert "simulated" not in done.stdout


@pytest.mark.parametrize("asked", [["hardware=h100_sxm", "mesh.devices=16"], ["mesh.devices=16", "mesh.devices_per_host=8"]])
def test_draw_cuts_the_devices_into_hosts_and_says_which_axes_cross_them(tmp_path, asked):
    done = scaling_lab("draw", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 hosts" in done.stdout
    assert "2 x 8 devices (per_host)" in done.stdout
    rows = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if "(auto)" in line}
    assert rows == {"fsdp": "yes", "tensor": "no"}, "a host has 4 of fsdp's 8 parts, each with both of tensor"


def test_draw_shows_every_job_of_a_sweep_and_writes_nothing(tmp_path):
    done = scaling_lab("draw", "sharding=data,fsdp", "-m", "model.layers=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "table data" in done.stdout
    assert "table fsdp" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_request_that_only_a_worker_can_see_exits_2_as_well(tmp_path):
    (tmp_path / "empty.txt").touch()
    asked = ["run", "data=text", "data.path=empty.txt", "mesh.devices=1", "sharding=single", "tracking=disabled"]
    done = scaling_lab(*asked, f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "0 tokens" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"]["kind"] == "config"


def test_a_wrong_request_for_data_is_refused_before_the_plan_is_shown_and_any_worker_starts(tmp_path):
    done = scaling_lab("run", "data=text", "data.path=gone.txt", f"hydra.run.dir={tmp_path}/run", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert not list((tmp_path / "run").glob("worker-*.log"))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"]["kind"] == "config"


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    command = [sys.executable, "-m", "scaling_lab", "run", "mesh.devices=1", "sharding=single", "model.layers=1"]
    command += ["data=synthetic", "workload.steps=3", "workload.untimed_steps=1", "workload.sequence=16"]
    command += ["tracking=disabled", f"hydra.run.dir={tmp_path}/run"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"


def test_one_eager_torch_device_is_a_real_cpu_on_which_nothing_was_compiled(tmp_path):
    asked = ["run", "backend=torch", "mesh=one", "sharding=single", "model.layers=1", "data=synthetic", "workload.steps=2"]
    asked += ["workload.untimed_steps=1", "workload.sequence=16", "tracking=disabled", f"hydra.run.dir={tmp_path}/run"]
    done = scaling_lab(*asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line.partition("  ")[0]: line.split("  ")[-1].strip() for line in done.stdout.splitlines()}
    assert lines["devices"] == "1 real: cpu"
    assert lines["compile time"] == "- (eager: nothing was compiled)"


def test_hydra_flags_work(tmp_path):
    done = scaling_lab("run", "--cfg", "job", "model.layers=7", cwd=tmp_path)
    assert done.returncode == 0
    assert "layers: 7" in done.stdout


def test_the_version_is_that_of_the_package(tmp_path):
    done = scaling_lab("--version", cwd=tmp_path)
    packaged = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["version"]
    assert (done.returncode, done.stdout) == (0, f"scaling_lab {packaged}\n")


def test_show_gives_each_run_of_a_sweep_and_then_the_sweep_in_one_table(tmp_path):
    for name in ("0-jax", "1-jax"):
        run_folder(tmp_path / "sweep" / name)
    done = scaling_lab("show", "sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nrun folder") == 2
    assert "2 runs of tiny" in done.stdout.partition("1-jax")[2]
    assert "runs of" not in scaling_lab("show", "sweep/0-jax", cwd=tmp_path).stdout


def test_usage_is_shown_on_request_and_promises_no_launcher_that_is_not_here(tmp_path):
    done = scaling_lab("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "hydra/launcher=NAME once its plugin is" in done.stdout
    assert scaling_lab(cwd=tmp_path).returncode == 2
