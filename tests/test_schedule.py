"""The learning rate of a step, by hand."""

from dataclasses import replace

import pytest
from experiments import experiment

from scaling_lab.plan.schedule import learning_rate

BASE = replace(experiment().workload.optimizer, lr=1.0, warmup_steps=4, final_lr_fraction=0.2)


def rates(schedule, steps, **changes):
    optimizer = replace(BASE, schedule=schedule, **changes)
    return [learning_rate(optimizer, steps, step) for step in range(steps)]


def test_warm_up_rises_to_the_peak_in_equal_parts():
    assert rates("constant", 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_schedule_falls_towards_its_final_fraction():
    # after 4 of 8 steps, a quarter of the way from 1 to 0.2 each: 1 - 0.8 * 0, 1/4, 2/4, 3/4
    assert rates("linear", 8)[4:] == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_cosine_schedule_is_half_way_at_its_middle():
    # 0.2 + 0.8 * (1 + cos(pi * p)) / 2 at p = 0, 1/4, 1/2, 3/4; cos(pi / 4) = 0.70710678
    assert rates("cosine", 8)[4:] == pytest.approx([1.0, 0.2 + 0.4 * 1.70710678, 0.6, 0.2 + 0.4 * 0.29289322])


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates("cosine", 3, warmup_steps=0)[0] == 1.0


def test_beyond_the_last_step_the_rate_stays_at_its_end():
    assert learning_rate(replace(BASE, schedule="cosine"), 8, 8) == pytest.approx(0.2)
    assert learning_rate(replace(BASE, schedule="linear"), 8, 100) == pytest.approx(0.2)


def test_a_run_that_ends_in_its_warm_up_never_reaches_the_peak():
    assert rates("cosine", 3) == [0.25, 0.5, 0.75]
