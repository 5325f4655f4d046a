"""What was asked differently of several runs: the keys that a table must show for its rows to be told apart.

Owns which keys say nothing new beside others. Knows keys by their dotted names only, not what they mean to a run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaling_lab.plan.contradictions import BACKEND_KEYS
from scaling_lab.plan.experiment import MESH_AXES
from scaling_lab.report.units import UNKNOWN
from scaling_lab.results.metrics import Result, at

#: Keys that every table shows, as backend, table and mesh.
SHOWN = frozenset(("backend.name", "sharding.name", "mesh.name", "mesh.devices", *(f"mesh.{axis}" for axis in MESH_AXES)))

#: Keys, or groups of them, and the name that they follow from: nothing new where the runs of a name have equal ones.
FOLLOW = {
    "model": "model.name",
    "sharding": "sharding.name",
    "hardware": "hardware.name",
    "backend.processes": "backend.name",
}

#: What a key of one backend is in the other, where it is null: nothing was asked differently there.
USUAL = {f"backend.{key}": value for keys in BACKEND_KEYS.values() for key, value in keys.items()}


def different_keys(results: Sequence[Result | None]) -> list[str]:
    """The dotted keys of the experiments in which these runs differ and that no other column tells, in the config's order.

    A key that is off (null or false) is equal to one that is absent, as in results of a lab that did not know it yet.
    """
    experiments = [dict(_leaves("", result["experiment"])) for result in results if result is not None]
    keys = dict.fromkeys(key for experiment in experiments for key in experiment)
    return [
        key
        for key in keys
        if key not in SHOWN and len({_comparable(one, key) for one in experiments}) > 1 and not _follows(key, experiments)
    ]


def value_text(result: Result, key: str) -> str:
    """The value of a key as a table shows it; a dash where a run has no such key."""
    value = at(result, f"experiment.{key}")
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return UNKNOWN if value is None else json.dumps(value)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)


def _comparable(experiment: Mapping[str, Any], key: str) -> str:
    value = USUAL.get(key) if experiment.get(key) is None else experiment[key]
    return json.dumps(None if value is False else value, sort_keys=True, default=str)


def _follows(key: str, experiments: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the runs of each name, of which there are several, have the same value."""
    name = next((name for start, name in FOLLOW.items() if key == start or key.startswith(f"{start}.")), None)
    if name is None or name == key:
        return False
    pairs = {(_comparable(one, name), _comparable(one, key)) for one in experiments}
    return len(pairs) == len({of_name for of_name, _ in pairs})
