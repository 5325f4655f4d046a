"""Tracking: one W&B run per job, finished however the job ends, and never the reason that a run stops or waits.

Real wandb throughout, read back from the file it writes or from a server on the loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb_log
from experiments import FOUND, experiment
from finished_runs import PEAK, records, result
from wandb_server import Server, serving

from scaling_lab.plan.plan import make_plan
from scaling_lab.results.metrics import Scale
from scaling_lab.results.tracker import Tracker

ROOT = Path(__file__).parent.parent
KEY = "a" * 40

#: The most, in seconds, that a missing network may cost beyond what tracking offline takes on this machine.
DELAY_S = 15.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own for wandb: no key, no settings of whoever runs the tests, and anything left there is seen."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("NETRC", str(folder / ".netrc"))
    return folder


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert [process.cmdline() for process in psutil.wait_procs(left, timeout=5)[1]] == []


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A W&B server that knows the key."""
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        yield server


def track(folder: Path, mode: str, said: list[str], **choices: Any) -> Tracker:
    """A tracker of the sample job that has been given all of its records."""
    asked = experiment(tracking=mode, **choices)
    scale = Scale(tokens_per_step=4_096, devices=8, flops_per_token=6_494_976, peak=PEAK)
    folder.mkdir(exist_ok=True)
    plan = make_plan(asked, FOUND)
    tracker = Tracker(asked, plan, folder, run_id="a-run", sweep="a-sweep", scale=scale, say=said.append)
    for record in records():
        tracker.record(record)
    return tracker


def test_an_offline_run_has_every_step_the_config_and_the_group(tmp_path: Path, home: Path) -> None:
    said: list[str] = []
    info = track(tmp_path / "run", "offline", said).finish(exit_code=0, result=result())
    assert said == []
    run = wandb_log.only(tmp_path / "run")
    assert run["exit_code"] == 0
    assert run["run"] == {"project": "scaling_lab", "group": "a-sweep", "name": "run", "tags": []}
    assert run["config"]["workload"]["global_batch"] == 16
    assert run["config"]["plan"]["mesh"]["fsdp"] == 4
    assert [row["_step"] for row in run["history"]] == [1, 2, 3, 4, 5, 6]
    third, last = run["history"][2], run["history"][-1]
    assert (third["loss"], third["grad_norm"], third["lr"]) == (4.5, 2.25, 3e-3)
    assert (third["step_time_s"], third["tokens_per_s"], third["tokens_per_s_per_device"]) == (0.4, 10_240, 1_280)
    assert third["tokens_seen"] == 3 * 4_096
    assert third["mfu"] == pytest.approx(6_494_976 * 10_240 / 8 / PEAK)
    assert (last["validation_loss"], last["memory_bytes_per_device"]) == (3.25, 1_000)
    assert run["summary"]["tokens_per_s"] == pytest.approx(16_384)
    assert run["summary"]["status"] == "ok"
    assert info["mode"] == "offline"
    assert Path(info["folder"]).parent == tmp_path / "run" / "wandb"


def test_tracking_leaves_nothing_outside_the_run_folder(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    track(tmp_path / "run", "offline", []).finish(exit_code=0)
    assert list(home.rglob("*")) == []
    assert list(elsewhere.iterdir()) == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["wandb"]


def test_a_job_that_failed_is_finished_as_failed(tmp_path: Path) -> None:
    track(tmp_path / "run", "offline", []).finish(exit_code=1)
    run = wandb_log.only(tmp_path / "run")
    assert (run["exit_code"], len(run["history"])) == (1, 6)


def test_a_run_is_finished_as_failed_when_the_coordinator_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; import test_tracking\n"
        "tracker = test_tracking.track(Path(sys.argv[1]), 'offline', [])\n"
        "print(tracker._process.pid, flush=True)\n"
        "while tracker._info['folder'] is None: tracker._threads[1].join(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], env=environment, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    tracking = int(done.stdout)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(tracking).wait(timeout=30)
    run = wandb_log.only(tmp_path / "run")
    assert (run["exit_code"], len(run["history"])) == (1, 6)


def test_disabled_writes_nothing_and_starts_nothing(tmp_path: Path) -> None:
    before = psutil.Process().children()
    tracker = track(tmp_path / "run", "disabled", [])
    assert psutil.Process().children() == before
    assert tracker.finish(exit_code=0) == {"mode": "disabled", "folder": None, "url": None, "notice": None}
    assert list((tmp_path / "run").iterdir()) == []


def test_the_coordinator_never_imports_wandb() -> None:
    code = "import sys, scaling_lab.results.tracker; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_starting_and_recording_return_at_once(tmp_path: Path) -> None:
    tracker = track(tmp_path / "run", "offline", [])
    assert tracker._info["folder"] is None  # every record is given, and wandb has not even started
    assert tracker.finish(exit_code=0)["folder"]


def test_an_online_run_arrives_at_the_server(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    info = track(tmp_path / "run", "online", said).finish(exit_code=1, result=result())
    assert (said, info["mode"]) == ([], "online")
    assert [row["loss"] for row in server.history()] == [5.5, 5.0, 4.5, 4.0, 3.5, 3.0]
    assert server.exit_codes() == [1]
    (run,) = server.runs.values()
    assert (run["project"], run["groupName"]) == ("scaling_lab", "a-sweep")


def assert_went_offline(folder: Path, reason: str) -> None:
    """The run is tracked offline, whole, soon, and that was said once with its reason."""
    said: list[str] = []
    start = time.monotonic()
    track(folder.parent / "offline", "offline", []).finish(exit_code=0)
    between = time.monotonic()
    info = track(folder, "online", said).finish(exit_code=0)
    assert time.monotonic() - between < DELAY_S + (between - start)
    assert info["mode"] == "offline"
    (words,) = said
    assert words.startswith("W&B online is not possible (")
    assert reason in words
    run = wandb_log.only(folder)
    assert (run["exit_code"], len(run["history"])) == (0, 6)


def test_online_without_a_key_goes_offline(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    assert_went_offline(tmp_path / "run", "No API key configured")
    assert server.runs == {}


def test_online_with_a_key_that_the_server_refuses_goes_offline(tmp_path: Path, server: Server) -> None:
    server.refuse = 401
    assert_went_offline(tmp_path / "run", "the key is not known")


def test_online_with_a_port_that_refuses_goes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        assert_went_offline(tmp_path / "run", "Connection refused")


def test_online_with_a_server_that_never_answers_goes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        assert_went_offline(tmp_path / "run", "does not answer within 3 s")


@pytest.mark.slow
def test_a_server_that_falls_silent_during_the_run_costs_seconds_and_loses_nothing(tmp_path: Path, server: Server) -> None:
    said: list[str] = []
    tracker = track(tmp_path / "run", "online", said)
    while tracker._info["folder"] is None:
        tracker._threads[1].join(0.05)
    server.answering.clear()
    start = time.monotonic()
    info = tracker.finish(exit_code=0)
    assert time.monotonic() - start < DELAY_S
    assert said == [info["notice"]]
    assert f"upload it later with `wandb sync {info['folder']}`" in said[0]
    assert len(wandb_log.only(tmp_path / "run")["history"]) == 6


def test_a_tracking_process_that_dies_costs_a_line_and_not_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = track(tmp_path / "run", "offline", said)
    assert tracker._process is not None
    tracker._process.kill()
    for record in records():
        tracker.record(record)
    info = tracker.finish(exit_code=0)
    assert said == [info["notice"]]
    assert "W&B tracking ended early" in said[0]


def test_a_folder_that_cannot_be_written_costs_a_line_and_not_the_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").write_text("in the way")
    said: list[str] = []
    info = track(tmp_path / "run", "offline", said).finish(exit_code=0)
    assert said == [info["notice"]]
    assert "could not start" in said[0]
