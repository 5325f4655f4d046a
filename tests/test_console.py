"""The console: what a person is shown, on a terminal and in a file."""

from __future__ import annotations

import contextlib
import io
import os
import pty
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from experiments import FOUND, experiment
from finished_runs import PEAK, done, records, result, routed
from rich.console import Console

from scaling_lab.errors import WorkerError
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.plan import Found, make_plan
from scaling_lab.predict.peak import DevicePeak, MachinePeak
from scaling_lab.report import units
from scaling_lab.report.console import open_console, show_plan, show_progress, show_result
from scaling_lab.report.decisions import number_lines
from scaling_lab.report.drawing import draw_mesh
from scaling_lab.report.progress import is_told
from scaling_lab.results.metrics import Scale

SCALE = Scale(tokens_per_step=4_096, devices=8, flops_per_token=6_494_976, peak=PEAK)


def shown(show, *arguments) -> str:
    file = io.StringIO()
    show(open_console(file), *arguments)
    return file.getvalue()


def test_a_mesh_of_two_axes_is_drawn_with_its_hosts_cut() -> None:
    mesh = Mesh((("data", 1), ("fsdp", 4), ("tensor", 2)), hosts=2)
    assert draw_mesh(mesh) == "\n".join(
        [
            "          tensor 0   tensor 1 ",
            "        +----------+----------+",
            "fsdp 0  |    0          1     |  host 0",
            "fsdp 1  |    2          3     |",
            "        +----------+----------+",
            "fsdp 2  |    4          5     |  host 1",
            "fsdp 3  |    6          7     |",
            "        +----------+----------+",
        ]
    )


def test_hosts_that_cut_a_row_are_parted_by_bars() -> None:
    lines = draw_mesh(Mesh((("fsdp", 2), ("tensor", 4)), hosts=4)).splitlines()
    assert lines[2] == "fsdp 0  |    0          1     |    2          3     |  hosts 0 to 1"
    assert lines[4] == "fsdp 1  |    4          5     |    6          7     |  hosts 2 to 3"


def test_outer_axes_make_blocks_and_a_single_axis_a_row() -> None:
    drawn = draw_mesh(Mesh((("data", 2), ("fsdp", 2), ("tensor", 2)), hosts=1))
    assert [line for line in drawn.splitlines() if line.startswith("data")] == ["data 0", "data 1"]
    assert draw_mesh(Mesh((("data", 2),), hosts=1)).splitlines()[2] == "|   0        1    |  host 0"
    assert draw_mesh(Mesh((("data", 1),), hosts=1)) == "device 0"


@pytest.mark.parametrize(
    "axes", [(("data", 4096),), (("data", 1024), ("fsdp", 64), ("tensor", 64)), (("fsdp", 512), ("tensor", 8))]
)
def test_a_big_mesh_is_cut_and_what_is_missing_is_counted(axes) -> None:
    drawn = draw_mesh(Mesh(axes, hosts=8)).splitlines()
    assert len(drawn) < 120
    assert max(map(len, drawn)) < 160
    assert "more" in "".join(drawn)


def test_the_plan_shows_mesh_roles_bytes_batch_and_numbers_with_their_arithmetic() -> None:
    asked = experiment(**{"mesh.hosts": 2})
    text = shown(show_plan, asked, make_plan(asked, FOUND))
    for expected in (
        "tiny, table fsdp_tensor, jax, 8 simulated cpu devices on 2 hosts",
        "fsdp 3  |    6          7     |",
        "tensor  2 (auto)  tensor parallel, repeated  no",
        "1 microbatch of 16 rows / 4 (fsdp 4) = 4 rows a device",
        "16 rows x 256 tokens = 4,096",
        "6 x 820,352 multiplied parameters + 12 x 4 layers x 4 heads x 32 x 256 tokens = 6.49 M",
        "6.49 M x 4,096 tokens = 26.6 GFLOP",
        "2 x 4 devices (per_host)",
    ):
        assert expected in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_the_bytes_shown_are_the_plans_part_by_part() -> None:
    asked = experiment()
    plan = make_plan(asked, FOUND)
    (words,) = [text for name, text in number_lines(asked, plan) if name == "bytes per device"]
    # parameters and gradients: 853,120 x 4 bytes / 8 devices, but norms over fsdp only; AdamW keeps twice the parameters
    assert units.size(plan.bytes_per_device["parameters"]) in words
    assert words.endswith(f"= {units.size(plan.bytes_per_device['total'])}, by arithmetic")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # 23.13 MiB of 24 GiB are 0.0941 %
        (FOUND, "this (cpu): 24.00 GiB a device, 0.0941 % planned, 23.98 GiB left"),
        (Found("gpu", 8, False, None), "this (gpu): memory unknown"),
    ],
)
def test_the_hardware_is_named_with_the_memory_that_the_plan_leaves(found: Found, words: str) -> None:
    asked = experiment()
    assert dict(number_lines(asked, make_plan(asked, found)))["hardware"] == words


@pytest.mark.parametrize("model", ["tiny", "gpt2_124m", "llama3_1b"])
def test_the_flops_shown_multiply_out_for_every_kind_of_model(model: str) -> None:
    asked = experiment(model=model, sharding="fsdp")
    text = dict(number_lines(asked, make_plan(asked, FOUND)))["FLOPs per token"]
    multiplied = int(text.split()[2].replace(",", ""))
    size = asked.model
    attention = 12 * size.layers * size.heads * size.head_dim * asked.workload.sequence
    assert 6 * multiplied + attention == make_plan(asked, FOUND).flops_per_token


def run_progress(console: Console, steps: int = 6) -> None:
    progress = show_progress(console, experiment(**{"workload.steps": steps}), SCALE)
    try:
        for record in records():
            progress.record(record)
    finally:
        progress.close()
        progress.close()


def test_without_a_terminal_progress_is_plain_lines() -> None:
    text = shown(run_progress)
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    # step 1 took 5 s: 4,096 / 5 tokens/s; five steps and one evaluation of yet unknown length are left
    assert lines[0] == "step 1/6  loss 5.5000  819 tokens/s  25 s left"
    # at the median of the six, (0.3 + 0.4) / 2 s, and nothing is left
    assert lines[-2] == "step 6/6  loss 3.0000  11,703 tokens/s"
    assert lines[-1] == "step 6: validation loss 3.2500 over 16,384 tokens in 500 ms"
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("backend", "keys", "told"),
    [("jax", {}, True), ("torch", {}, False), ("torch", {"backend.compile": True}, True)],
)
def test_without_a_terminal_the_compiler_is_announced_where_there_is_one(backend, keys, told) -> None:
    file = io.StringIO()
    progress = show_progress(open_console(file), experiment(backend=backend, **keys), SCALE)
    for process in (0, 1):
        for phase in ("startup", "compile", "train"):
            progress.record({"kind": "phase", "phase": phase, "process": process})
    assert file.getvalue() == "compiling the train step\n" * told


@pytest.mark.parametrize(
    ("untimed", "words"), [(0, "100, all timed;"), (1, "100, the first untimed;"), (2, "the first 2 untimed;")]
)
def test_the_steps_left_out_of_the_time_are_counted_in_words(untimed, words) -> None:
    asked = experiment(**{"workload.untimed_steps": untimed})
    assert words in dict(number_lines(asked, make_plan(asked, FOUND)))["steps"]


def test_a_job_that_compiled_nothing_says_so_instead_of_a_time() -> None:
    last = done()
    eager = [*records()[:-1], {**last, "compilations": None, "time_parts_s": {**last["time_parts_s"], "compile": 0.0}}]
    text = shown(show_result, result({"backend": "torch"}, records=eager), Path("/runs/x"))
    assert "- (eager: nothing was compiled)" in text


def test_a_long_run_is_told_in_about_ten_lines() -> None:
    told = [step for step in range(1, 1_001) if is_told(step, 1_000)]
    assert told == [1, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1_000]
    assert [step for step in range(1, 4) if is_told(step, 3)] == [1, 2, 3]
    assert len([step for step in range(1, 98) if is_told(step, 97)]) == 11


def test_time_left_is_the_recent_median_times_the_steps_and_evaluations_left() -> None:
    progress = show_progress(open_console(io.StringIO()), experiment(**{"workload.steps": 120}), SCALE)
    step = {"kind": "step", "loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_seen": 1, "timed": True}
    progress.record({**step, "step": 1, "step_time_s": 9.0})  # one slow first step must not rule the rest
    for number in range(2, 51):
        progress.record({**step, "step": number, "step_time_s": 0.5})
    assert progress.left_s() == pytest.approx(70 * 0.5)
    progress.record({"kind": "evaluation", "step": 50, "loss": 1.0, "tokens": 10, "time_s": 4.0})
    assert progress.left_s() == pytest.approx(70 * 0.5 + 2 * 4.0)  # at step 100, and at the last


def read_all(terminal: int) -> str:
    """What is written to a terminal until its other end is closed, which Linux tells as an error."""
    text = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            text += data
    return text.decode()


def test_on_a_terminal_there_is_a_bar_with_loss_and_speed_that_goes_away() -> None:
    leader, follower = pty.openpty()
    with ThreadPoolExecutor() as threads, os.fdopen(follower, "w") as terminal:
        reading = threads.submit(read_all, leader)
        assert open_console(terminal).is_terminal
        run_progress(Console(file=terminal, force_terminal=True, width=120, highlight=False, _environ={"TERM": "xterm"}))
        terminal.close()
        text = reading.result(timeout=30)
    os.close(leader)
    assert "\x1b[" in text
    assert "loss 3.0000" in text
    assert "6/6" in text
    assert "step 6: validation loss 3.2500" in text
    assert "step 1/6" not in text


def test_the_final_table_has_every_number_and_says_that_devices_are_simulated() -> None:
    text = shown(show_result, result(), Path("/runs/x"))
    for expected in (
        "tiny, table fsdp_tensor, jax, 8 simulated devices",
        "3.000000 after 6 steps",
        "3.250000 at step 6, over 16,384 tokens",
        "16,384 (2,048 per device)",
        "250 ms median, p10 130 ms, p90 370 ms, 4 timed steps",
        "50 % (43.9 % counting half of the attention) of 26.6 GFLOP/s: a published number; 25 % of what jax itself reaches",
        "1000 B (parameters 900 B, temporaries 100 B)",
        "4 s, 1 compilation of the train step",
        "5 s; first step 9 s after the command",
        "20 s = startup 5 s, compile 4 s, untimed steps 6 s, timed steps 1 s, evaluation 500 ms, other 3.5 s",
        "8 simulated, sharing one processor (a processor, 2 cores): speed says nothing about 8 real devices",
        "/runs/x",
    ):
        assert expected in text
    assert "\x1b" not in text


def test_a_mixture_says_what_its_routers_report_and_a_dense_model_has_no_such_line() -> None:
    text = shown(show_result, result({"model": "tiny_moe"}, records=routed(records())), Path("/runs/x"))
    assert "balance loss 4.6000 (4 when even), z loss 0.6000, dropped 600 assignments, 1.07 % in all steps" in text
    assert "routers" not in shown(show_result, result(), Path("/runs/x"))


def test_unknown_numbers_are_dashes_and_never_zeros() -> None:
    unknown = DevicePeak("float32", None, None, "unknown: hardware.peak_f32_tflops of `x` is null", None)
    text = shown(show_result, result(peak=unknown, records=records()[:3]), Path("/runs/x"))
    assert "- (peak unknown: hardware.peak_f32_tflops of `x` is null)" in text
    assert "- (no timed step)" in text
    assert "- (not evaluated)" in text


def test_an_mfu_above_one_says_that_the_peak_is_stale_and_which_file_to_delete() -> None:
    machine = MachinePeak("float32", 1e9, "torch", {"torch": 1e9}, "then", 7.5, "/cache/peak.json")
    text = shown(show_result, result(peak=DevicePeak("float32", 1e9, 1e9, "measured", machine)), Path("/runs/x"))
    assert "busy (load 7.5); delete /cache/peak.json to measure it again" in " ".join(text.split())


def test_a_failed_run_is_one_message_and_no_table() -> None:
    failed = result(records=records()[:4], error=WorkerError("process 3 [host 0] was killed by SIGKILL"))
    assert shown(show_result, failed, Path("/runs/x")) == (
        "failed: process 3 [host 0] was killed by SIGKILL\nrun folder: /runs/x\n"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.scaled(6_494_976), "6.49 M"),
        (units.scaled(26.6e9, "FLOP/s"), "26.6 GFLOP/s"),
        (units.scaled(999_999), "1 M"),
        (units.scaled(12), "12"),
        (units.size(1_000), "1000 B"),
        (units.size(3 * 2**20 // 2), "1.50 MiB"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(185.4), "3 min 05 s"),
        (units.seconds(7_260), "2 h 01 min"),
        (units.percent(0.4131), "41.3 %"),
        (units.count(None), "-"),
        (units.plural(1, "device"), "1 device"),
        (units.plural(2, "microbatch"), "2 microbatches"),
    ],
)
def test_numbers_are_written_with_their_units(text: str, expected: str) -> None:
    assert text == expected
