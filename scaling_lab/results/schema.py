"""The form of result.json, schema_version 1: which keys there are and what each may hold. Owns no value.

More keys than these are welcome; a missing one is a fault, unknown is null.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA_VERSION = 1

STATUSES = ("ok", "failed", "infeasible")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "send_recv", "broadcast")
#: What the routers of a mixture report of a step, null for a dense model.
ROUTER_METRICS = ("balance_loss", "z_loss", "dropped_tokens")
TIME_PARTS = ("startup", "compile", "untimed_steps", "timed_steps", "evaluation", "checkpoint", "other")

#: How far `time_parts_s` may be from `wall_time_s`, as a fraction of it.
TIME_TOLERANCE = 0.01

Faults = list[str]
Check = Callable[[str, Any], Faults]


def validate(result: Mapping[str, Any]) -> list[str]:
    """Everything in which a result differs from schema_version 1, a line each; none if it follows it."""
    faults = _RESULT("result", result)
    if faults:
        return faults
    return [*_status_faults(result), *_time_faults(result)]


def _status_faults(result: Mapping[str, Any]) -> Faults:
    if result["schema_version"] != SCHEMA_VERSION:
        return [f"schema_version: {result['schema_version']} is not {SCHEMA_VERSION}"]
    if (result["status"] == "ok") != (result["error"] is None):
        return [f"status {result['status']!r} does not go with error {result['error']!r}"]
    return []


def _time_faults(result: Mapping[str, Any]) -> Faults:
    wall, parts = result["measured"]["wall_time_s"], result["measured"]["time_parts_s"]
    if wall is None:
        return []
    total = sum(part for part in parts.values() if part is not None)
    if abs(total - wall) > TIME_TOLERANCE * wall:
        return [f"measured.time_parts_s: adds up to {total:.3f} s, wall_time_s is {wall:.3f} s"]
    return []


def _number(where: str, value: Any) -> Faults:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)):
        return []
    return [f"{where}: {value!r} is not a finite number or null"]


def _text(where: str, value: Any) -> Faults:
    return [] if isinstance(value, str) else [f"{where}: {value!r} is not text"]


def _integer(where: str, value: Any) -> Faults:
    return [] if isinstance(value, int) and not isinstance(value, bool) else [f"{where}: {value!r} is not an integer"]


def _anything(where: str, value: Any) -> Faults:
    return []


def _either(*choices: Any) -> Check:
    return lambda where, value: [] if value in choices else [f"{where}: {value!r} is not one of {list(choices)}"]


def _optional(check: Check) -> Check:
    return lambda where, value: [] if value is None else check(where, value)


def _many(check: Check) -> Check:
    def checked(where: str, value: Any) -> Faults:
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [fault for index, item in enumerate(value) for fault in check(f"{where}[{index}]", item)]

    return checked


def _named(check: Check) -> Check:
    """A mapping of any names to values of one kind."""

    def checked(where: str, value: Any) -> Faults:
        if not isinstance(value, Mapping):
            return [f"{where}: not a mapping"]
        return [fault for key, inner in value.items() for fault in check(f"{where}.{key}", inner)]

    return checked


def _keys(**checks: Check) -> Check:
    """A mapping that has at least these keys."""

    def checked(where: str, value: Any) -> Faults:
        if not isinstance(value, Mapping):
            return [f"{where}: not a mapping"]
        missing = [f"{where}.{key}: missing" for key in checks if key not in value]
        return missing + [f for key, check in checks.items() if key in value for f in check(f"{where}.{key}", value[key])]

    return checked


def _numbers(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _number)


def _bytes(where: str, value: Any) -> Faults:
    return _keys(total=_number)(where, value) + _named(_number)(where, value)


_COLLECTIVES = _optional(
    _many(
        _keys(
            op=_either(*COLLECTIVES),
            axes=_many(_text),
            dtype=_anything,
            overlapped=_either(True, False, None),
            **_numbers("count", "bytes"),
        )
    )
)
_RATES = _numbers("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu")

_PLAN = _keys(
    mesh=_optional(_named(_integer)),
    roles=_optional(_named(_many(_text))),
    crossing_axes=_optional(_many(_text)),
    bytes_per_device=_bytes,
    **_numbers("parameters", "flops_per_token", "devices", "hosts"),
)
_MEASURED = _keys(
    step_time_distribution_s=_keys(**_numbers("p10", "p90", "mean", "count")),
    bytes_per_device=_bytes,
    collectives=_COLLECTIVES,
    loss=_many(_number),
    grad_norm=_many(_number),
    **dict.fromkeys(ROUTER_METRICS, _optional(_many(_number))),
    time_parts_s=_keys(**_numbers(*TIME_PARTS)),
    **_RATES,
    **_numbers("mfu_causal", "model_flops_per_s_per_device", "compilations", "tokens_seen", "wall_time_s"),
)
_RESULT = _keys(
    schema_version=_integer,
    run_id=_text,
    status=_either(*STATUSES),
    error=_optional(_keys(kind=_text, message=_text)),
    experiment=_named(_anything),
    environment=_keys(
        **dict.fromkeys(("python", "versions", "platform", "cpu", "devices", "simulated", "git", "command"), _anything)
    ),
    plan=_PLAN,
    predicted=_keys(bytes_per_device=_bytes, collectives=_COLLECTIVES, breakdown=_anything, **_RATES),
    compiled=_keys(
        target=_optional(_text),
        bytes_per_device=_bytes,
        collectives=_COLLECTIVES,
        **_numbers("compile_time_s", "flops_per_step_per_device"),
    ),
    measured=_MEASURED,
)
