"""Metrics: one function and one line each, of a result alone."""

from __future__ import annotations

import json

import pytest
from finished_runs import PEAK, records, result, routed, staged

from scaling_lab.results.metrics import METRICS, Scale, step_metrics, values


def test_every_metric_of_the_sample_job_is_as_computed_by_hand() -> None:
    expected = {
        "loss": 3.0,
        "grad_norm": 1.5,
        "validation_loss": 3.25,
        "balance_loss": None,
        "z_loss": None,
        "dropped_tokens": None,
        "dropped_fraction": None,
        "tokens_per_s": 16_384.0,
        "tokens_per_s_per_device": 2_048.0,
        "step_time_s": 0.25,
        "bubble_share": None,
        "planned_bubble_share": None,
        "step_time_p10_s": 0.13,
        "step_time_p90_s": 0.37,
        "mfu": 0.5,
        "mfu_causal": (6_494_976 - 786_432) / 6_494_976 / 2,
        "mfu_of_library": 0.25,  # the library reached twice the peak here
        "model_flops_per_s_per_device": 13_301_710_848.0,
        "memory_bytes_per_device": 1_000,
        "planned_bytes_per_device": result()["plan"]["bytes_per_device"]["total"],
        "resident_bytes": 5_000,
        "compile_s": 4.0,
        "startup_s": 5.0,
        "first_step_s": 9.0,
        "wall_time_s": 20.0,
        "compilations": 1,
        "tokens_seen": 24_576,
        "valid_fraction": 0.75,
        "cpu_time_per_step_s": 0.5,
    }
    assert values(result()) == pytest.approx(expected)


def test_what_routers_report_is_that_of_the_last_step_and_what_they_dropped_a_share_of_all() -> None:
    found = values(result({"model": "tiny_moe"}, records=routed(records())))
    assert (found["balance_loss"], found["z_loss"], found["dropped_tokens"]) == (4.6, 0.6, 600)
    # 100 + 200 + ... + 600 = 2,100 of 6 steps x 4,096 tokens x 2 experts a token x 4 layers
    assert found["dropped_fraction"] == pytest.approx(2_100 / (6 * 4_096 * 2 * 4))


def test_a_step_of_a_mixture_says_what_its_routers_report() -> None:
    scale = Scale(tokens_per_step=4_096, devices=8, flops_per_token=6_494_976, peak=None)
    (_, *steps) = [record for record in routed(records()) if record["kind"] == "step"]
    assert {"balance_loss": 4.2, "z_loss": 0.2, "dropped_tokens": 200}.items() <= step_metrics(steps[0], scale).items()


def test_the_bubble_of_a_pipeline_stands_beside_the_planned_one_and_in_its_steps() -> None:
    found = values(result({"sharding": "pipeline"}, records=staged(records())))
    assert (found["bubble_share"], found["planned_bubble_share"]) == (pytest.approx(0.45), 1 / 5)  # 4 microbatches, 2 stages
    (first, *_) = [record for record in staged(records()) if record["kind"] == "step"]
    assert step_metrics(first, Scale(4_096, 8, 6_494_976, None))["bubble_share"] == 0.1


def test_metrics_are_read_from_result_json_alone_and_an_empty_one_has_none() -> None:
    assert values(json.loads(json.dumps(result()))) == values(result())
    assert set(values({}).values()) == {None}


def test_a_result_from_before_a_metric_existed_gains_it_when_reported_again() -> None:
    old = result()
    for name in ("tokens_per_s", "mfu", "model_flops_per_s_per_device"):
        del old["measured"][name]
    assert values(old) == values(result())


def test_every_metric_has_a_name_of_its_own_a_unit_and_a_source() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.unit and metric.source for metric in METRICS)
    assert all(metric.unit == "s" for metric in METRICS if metric.name.endswith("_s") and "per_s" not in metric.name)
    assert all(metric.unit == "bytes" for metric in METRICS if "bytes" in metric.name)


def test_the_rates_of_one_step_use_the_formulas_of_the_whole_run() -> None:
    scale = Scale(tokens_per_step=4_096, devices=8, flops_per_token=6_494_976, peak=PEAK)
    record = {
        "step": 3,
        "loss": 4.5,
        "grad_norm": 2.25,
        "lr": 3e-3,
        "step_time_s": 0.25,
        "tokens_seen": 12_288,
        "cpu_time_s": 0.5,
    }
    assert step_metrics(record, scale) == pytest.approx(
        {
            "loss": 4.5,
            "grad_norm": 2.25,
            "lr": 3e-3,
            "step_time_s": 0.25,
            "tokens_seen": 12_288,
            "cpu_time_s": 0.5,
            "tokens_per_s": 16_384.0,
            "tokens_per_s_per_device": 2_048.0,
            "mfu": 0.5,
        }
    )


def test_a_step_says_nothing_of_what_is_unknown() -> None:
    scale = Scale(tokens_per_step=4_096, devices=8, flops_per_token=6_494_976, peak=None)
    assert "mfu" not in step_metrics({"loss": 1.0, "step_time_s": 0.25}, scale)
    assert step_metrics({"loss": 1.0}, scale) == {"loss": 1.0}
