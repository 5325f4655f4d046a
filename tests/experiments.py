"""Experiments for tests, read from the shipped presets with plain YAML: Hydra is not needed and not trusted here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from scaling_lab.config import experiment_from
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Found

CONF = Path(__file__).parent.parent / "conf"
GROUPS = ("model", "mesh", "sharding", "workload", "data", "backend", "hardware", "cluster", "tracking")

#: What the coordinator would find on a machine with 8 simulated CPU devices of 24 GiB each.
FOUND = Found("cpu", 8, True, 24 << 30)


def plain(**choices: Any) -> dict[str, Any]:
    """The composed config: `group="preset"` chooses presets, a dotted key, as in `{"workload.steps": 3}`, sets a value."""
    defaults = {key: value for entry in _read("config")["defaults"] if isinstance(entry, dict) for key, value in entry.items()}
    chosen = {group: choices.pop(group, defaults[group]) for group in GROUPS}
    config = {group: _read(f"{group}/{preset}") for group, preset in chosen.items()}
    for key, value in choices.items():
        _set(config, key, value)
    return config


def experiment(**choices: Any) -> Experiment:
    """The experiment: `experiment(sharding="data", model="tiny", **{"workload.steps": 3})`. Arguments as for `plain`."""
    return experiment_from(plain(**choices))


def _read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())


def _set(config: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    assert parents, f"{key}: a group is chosen by name, a key is dotted"
    for parent in parents:
        config = config[parent]
    config[last] = value
