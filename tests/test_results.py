"""result.json: every key of schema_version 1, each number checked by hand, and null for what is not known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from experiments import plain
from finished_runs import PEAK, done, environment, records, result, routed

from scaling_lab.errors import ConfigError, PlanError, WorkerError
from scaling_lab.predict.peak import DevicePeak
from scaling_lab.report.summary import summary_lines
from scaling_lab.results.partitioner import rematerializations
from scaling_lab.results.schema import validate


def test_the_result_of_a_finished_job_follows_the_schema() -> None:
    assert validate(result()) == []


def test_step_time_is_the_median_of_the_timed_steps_and_has_its_spread() -> None:
    measured = result()["measured"]
    # Timed: 0.4, 0.1, 0.3, 0.2 s. Median (0.2 + 0.3) / 2; p10 at place 0.3: 0.1 + 0.3 x 0.1; p90 at place 2.7: 0.3 + 0.7 x 0.1
    assert measured["step_time_s"] == pytest.approx(0.25)
    assert measured["step_time_distribution_s"] == pytest.approx({"p10": 0.13, "p90": 0.37, "mean": 0.25, "count": 4})


def test_rates_follow_from_the_median_whatever_the_layout() -> None:
    for sharding in ("single", "data", "fsdp", "fsdp_tensor"):
        found = result({"sharding": sharding})
        devices = found["plan"]["devices"]
        assert found["measured"]["tokens_per_s"] == pytest.approx(16 * 256 / 0.25)
        assert found["measured"]["tokens_per_s_per_device"] == pytest.approx(16_384 / devices)
        # 820,352 multiplied parameters x 6 + attention 12 x 4 layers x 4 heads x 32 x 256 = 6,494,976 FLOPs a token
        assert found["measured"]["model_flops_per_s_per_device"] == pytest.approx(6_494_976 * 16_384 / devices)
        assert found["measured"]["mfu"] == pytest.approx(6_494_976 * 16_384 / devices / PEAK)


def test_causal_mfu_counts_half_of_the_attention() -> None:
    measured = result()["measured"]
    assert measured["mfu"] == pytest.approx(0.5)
    # attention is 1,572,864 of the 6,494,976 FLOPs
    assert measured["mfu_causal"] == pytest.approx(0.5 * (6_494_976 - 1_572_864 / 2) / 6_494_976)


def test_neither_accumulation_nor_recomputation_changes_throughput_or_mfu() -> None:
    plainly = result()["measured"]
    for choice in ({"workload.accumulation": 4}, {"workload.remat": "full"}):
        changed = result(choice)["measured"]
        assert changed["tokens_per_s"] == plainly["tokens_per_s"]
        assert changed["mfu"] == plainly["mfu"]


def test_an_unknown_peak_gives_null_and_not_a_number() -> None:
    unknown = DevicePeak("float32", None, None, "unknown", None)
    for peak in (unknown, None):
        found = result(peak=peak)
        assert found["measured"]["mfu"] is None
        assert found["measured"]["mfu_causal"] is None
        assert found["measured"]["tokens_per_s"] == pytest.approx(16_384)
        assert validate(found) == []


def test_time_parts_add_up_to_the_wall_time() -> None:
    parts = result()["measured"]["time_parts_s"]
    # The coordinator's 2 s belong to startup; 20 - (5 + 4 + 6 + 1 + 0.5) = 3.5 s are left for other.
    assert parts == pytest.approx(
        {
            "startup": 5.0,
            "compile": 4.0,
            "untimed_steps": 6.0,
            "timed_steps": 1.0,
            "evaluation": 0.5,
            "checkpoint": 0.0,
            "other": 3.5,
        }
    )
    assert sum(parts.values()) == pytest.approx(20.0)


def test_parts_that_exceed_the_wall_time_are_a_fault_and_not_hidden() -> None:
    assert validate(result(wall_time_s=10.0)) == ["measured.time_parts_s: adds up to 16.500 s, wall_time_s is 10.000 s"]


def test_memory_is_that_of_the_fullest_process_and_nothing_is_counted_twice() -> None:
    told = [*records(), done(0), done(1, total=3_000)]  # the coordinator also passes on the `done` of every process
    measured = result(records=told)["measured"]
    assert measured["bytes_per_device"] == {"total": 3_000, "parameters": 2_900, "temporaries": 100}
    assert measured["resident_bytes"] == 10_000


def test_processor_time_is_that_of_all_processes_together() -> None:
    told = [*records(), done(0), {**done(1), "cpu_time_per_step_s": 0.25}]
    assert result(records=told)["measured"]["cpu_time_per_step_s"] == 0.75
    assert result(records=records()[:-1])["measured"]["cpu_time_per_step_s"] is None, "process 0 alone is not the job"


def test_parts_of_the_memory_are_kept_where_its_peak_is_unknown() -> None:
    told = [{**done(process), "bytes_per_device": {"total": None, "parameters": 10 + process}} for process in range(2)]
    assert result(records=told)["measured"]["bytes_per_device"] == {"total": None, "parameters": 11}


def test_unknown_memory_is_null() -> None:
    told = [*records()[:-1], {**done(), "bytes_per_device": {"total": None}, "resident_bytes": None}]
    measured = result(records=told)["measured"]
    assert measured["bytes_per_device"] == {"total": None}
    assert measured["resident_bytes"] is None


def test_losses_evaluations_and_tokens_are_those_of_every_step() -> None:
    measured = result()["measured"]
    assert measured["loss"] == [5.5, 5.0, 4.5, 4.0, 3.5, 3.0]
    assert measured["grad_norm"] == [2.75, 2.5, 2.25, 2.0, 1.75, 1.5]
    assert measured["evaluation"] == [{"step": 6, "loss": 3.25, "tokens": 16_384, "time_s": 0.5}]
    assert measured["tokens_seen"] == 6 * 4_096
    assert measured["valid_tokens_seen"] == 6 * 3_072
    assert measured["compilations"] == 1
    assert measured["corpus"] == {"sha256": "c0ffee"}


def test_the_bubble_is_the_median_of_the_timed_steps_and_null_where_none_was_measured() -> None:
    assert result()["measured"]["bubble_share"] is None
    shares = {1: 0.9, 2: 0.8, 3: 0.3, 4: 0.2, 5: 0.25, 6: 0.4}  # the first two are untimed: (0.25 + 0.3) / 2
    told = [{**r, "bubble_share": shares[r["step"]]} if r["kind"] == "step" else r for r in records()]
    found = result({"sharding": "pipeline"}, records=told)
    assert found["measured"]["bubble_share"] == pytest.approx(0.275)
    # 4 microbatches on 2 stages: planned 1 / 5.
    assert dict(summary_lines(found, Path()))["pipeline bubble"] == (
        "27.5 % of the schedule (by processor time, as if no stage shared a core); planned 20 %"
    )
    assert dict(summary_lines(result({"sharding": "pipeline"}), Path()))["pipeline bubble"] == "- (not measured); planned 20 %"
    assert "pipeline bubble" not in dict(summary_lines(result(), Path()))


def test_what_routers_report_is_that_of_every_step_and_null_without_them() -> None:
    found = result({"model": "tiny_moe"}, records=routed(records()))
    assert found["measured"]["balance_loss"] == pytest.approx([4.1, 4.2, 4.3, 4.4, 4.5, 4.6])
    assert found["measured"]["dropped_tokens"] == [100, 200, 300, 400, 500, 600]
    assert validate(found) == []
    assert all(result()["measured"][name] is None for name in ("balance_loss", "z_loss", "dropped_tokens"))


def test_steps_of_other_processes_are_not_mixed_in() -> None:
    others = [{**record, "loss": 99.0} for record in records(process=1) if record["kind"] == "step"]
    assert result(records=[*others, *records()])["measured"]["loss"] == [5.5, 5.0, 4.5, 4.0, 3.5, 3.0]


def test_a_job_that_failed_on_the_way_keeps_all_it_knew() -> None:
    error = WorkerError("process 3 was killed by SIGKILL", "worker")
    found = result(records=records()[:6], error=error, wall_time_s=10.0)  # four steps, two of them timed: 0.4 and 0.1 s
    assert validate(found) == []
    assert (found["status"], found["error"]) == ("failed", {"kind": "worker", "message": "process 3 was killed by SIGKILL"})
    measured = found["measured"]
    assert measured["loss"] == [5.5, 5.0, 4.5, 4.0]
    assert measured["step_time_s"] == pytest.approx(0.25)
    assert measured["tokens_per_s"] == pytest.approx(16_384)
    assert measured["bytes_per_device"] == {"total": None}
    parts = measured["time_parts_s"]
    assert (parts["untimed_steps"], parts["timed_steps"], parts["compile"]) == (6.0, pytest.approx(0.5), None)
    assert parts["other"] == pytest.approx(10 - 2 - 6.5)


def test_a_job_that_failed_after_its_compilation_has_that_in_its_place() -> None:
    told = [*records()[:2], {"kind": "prepared", "process": 0, "startup_s": 3.0, "compile_s": 4.0}]
    parts = result(records=told, error=WorkerError("killed", "worker"), wall_time_s=10.0)["measured"]["time_parts_s"]
    assert (parts["startup"], parts["compile"], parts["other"]) == (5.0, 4.0, pytest.approx(1.0))


def test_measuring_the_peak_is_a_part_of_its_own() -> None:
    parts = result(peak_measurement_s=3.0)["measured"]["time_parts_s"]
    assert (parts["peak_measurement"], parts["other"]) == (3.0, pytest.approx(0.5))
    assert sum(parts.values()) == pytest.approx(20.0)


def test_the_partitioners_warnings_are_counted(tmp_path) -> None:
    assert rematerializations(tmp_path) is None
    line = "W0000 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The compiler cannot go from\n"
    (tmp_path / "worker-0.log").write_text(2 * line)
    (tmp_path / "worker-1.log").write_text(line)
    assert rematerializations(tmp_path) == 3
    assert result(rematerializations=3)["compiled"]["involuntary_rematerializations"] == 3


def test_a_loss_that_is_no_number_is_null_in_its_place_and_its_step_is_named() -> None:
    found = result(records=records(losses=(5.5, 5.0, math.nan, 4.0, 3.5, math.inf)))
    assert validate(found) == []
    assert found["measured"]["loss"] == [5.5, 5.0, None, 4.0, 3.5, None]
    assert found["measured"]["nonfinite_steps"] == [3, 6]


def test_an_infeasible_job_has_no_plan_and_no_measurement() -> None:
    found = result(plan=None, records=(), error=PlanError("50257 over 8"), peak=None, wall_time_s=None)
    assert validate(found) == []
    assert (found["status"], found["error"]["kind"]) == ("infeasible", "infeasible")
    assert found["plan"]["devices"] is None
    assert found["measured"]["step_time_s"] is None
    assert found["measured"]["loss"] == []


def test_a_refused_config_still_makes_a_result() -> None:
    asked = plain()
    asked["workload"]["global_batch"] = "many"
    facts = {"experiment": asked, "plan": None, "records": (), "peak": None, "environment": environment(simulated=None)}
    found = result(error=ConfigError("workload.global_batch='many'"), **facts)
    assert validate(found) == []
    assert (found["status"], found["error"]["kind"]) == ("failed", "config")


def test_an_interrupt_and_an_internal_error_are_told_apart() -> None:
    assert result(error=KeyboardInterrupt())["error"]["kind"] == "interrupted"
    assert result(error=ValueError("no"))["error"] == {"kind": "internal", "message": "ValueError: no"}


def test_the_plan_is_summarised_with_its_axes_in_mesh_order() -> None:
    plan = result({"mesh.hosts": 2})["plan"]
    assert list(plan["mesh"].items()) == [
        ("pipeline", 1),
        ("data", 1),
        ("expert", 1),
        ("fsdp", 4),
        ("context", 1),
        ("tensor", 2),
    ]
    assert plan["crossing_axes"] == ["fsdp"]
    assert (plan["devices"], plan["hosts"], plan["parameters"]) == (8, 2, 853_120)
    assert plan["bytes_per_device"]["total"] == result({"mesh.hosts": 2})["predicted"]["bytes_per_device"]["total"]


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("measured", "loss"), [1.0, "2"], "result.measured.loss[1]: '2' is not a finite number or null"),
        (("measured", "mfu"), math.nan, "result.measured.mfu: nan is not a finite number or null"),
        (("measured", "bytes_per_device"), {}, "result.measured.bytes_per_device.total: missing"),
        (("status",), "great", "result.status: 'great' is not one of ['ok', 'failed', 'infeasible']"),
        (("plan", "mesh"), {"data": 1.5}, "result.plan.mesh.data: 1.5 is not an integer"),
        (
            ("error",),
            {"kind": "worker", "message": "x"},
            "status 'ok' does not go with error {'kind': 'worker', 'message': 'x'}",
        ),
        (("schema_version",), 2, "schema_version: 2 is not 1"),
    ],
)
def test_a_result_that_does_not_follow_the_schema_is_told_where(path, value, fault) -> None:
    found = result()
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert validate(found) == [fault]


@pytest.mark.parametrize("section", ["predicted", "compiled", "measured", "plan", "environment"])
def test_every_section_is_required_with_all_of_its_keys(section: str) -> None:
    whole = result()
    assert validate({**whole, section: {}})
    without = {key: value for key, value in whole.items() if key != section}
    assert validate(without) == [f"result.{section}: missing"]
