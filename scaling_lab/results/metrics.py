"""The metrics: each one function of a result and one line in a table. Owns every formula from seconds to MFU.

A metric reads only result.json, so a run that is already there gains a new one when it is reported again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scaling_lab.results.schema import ROUTER_METRICS

Result = Mapping[str, Any]
Number = float | int | None


@dataclass(frozen=True)
class Metric:
    """name: as in tables and files, with its unit where it has one; source: where in a result it comes from."""

    name: str
    unit: str
    source: str
    of: Callable[[Result], Number]


@dataclass(frozen=True)
class Scale:
    """What turns the time of a step into rates.

    tokens_per_step: global batch x sequence, padding included; flops_per_token: full attention;
    peak: FLOP/s of one device, None where unknown
    """

    tokens_per_step: int
    devices: int
    flops_per_token: float
    peak: float | None

    def tokens_per_s(self, step_time_s: float) -> float:
        """Tokens of all devices per second, whatever the layout."""
        return self.tokens_per_step / step_time_s

    def model_flops_per_s_per_device(self, step_time_s: float) -> float:
        """Model FLOPs / (time x devices): recomputation does not count."""
        return self.flops_per_token * self.tokens_per_s(step_time_s) / self.devices

    def mfu(self, step_time_s: float) -> float | None:
        """Model FLOPs / (time x devices x peak). Source: Chowdhery et al. 2022 (PaLM), appendix B. None without a peak."""
        return None if not self.peak else self.model_flops_per_s_per_device(step_time_s) / self.peak


def step_metrics(record: Mapping[str, Any], scale: Scale) -> dict[str, float | int]:
    """What a `step` record says, with the rates of that one step; what is unknown is left out."""
    told = ("loss", "grad_norm", *ROUTER_METRICS, "bubble_share", "lr", "step_time_s", "tokens_seen", "cpu_time_s")
    row = {key: record.get(key) for key in told}
    time_s = record.get("step_time_s")
    if time_s:
        tokens_per_s = scale.tokens_per_s(time_s)
        row |= {"tokens_per_s": tokens_per_s, "tokens_per_s_per_device": tokens_per_s / scale.devices}
        row["mfu"] = scale.mfu(time_s)
    return {key: value for key, value in row.items() if value is not None}


def at(result: Result, path: str) -> Any:
    """The value at a dotted path of a result, None where any part of the path is missing or null."""
    value: Any = result
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def tokens_per_step(result: Result) -> int | None:
    """Tokens of an optimizer step, padding included: global batch x sequence."""
    batch, sequence = at(result, "experiment.workload.global_batch"), at(result, "experiment.workload.sequence")
    return batch * sequence if batch and sequence else None


def _scale(result: Result, flops: str = "plan.flops_per_token", peak: str = "flops_per_s_per_device") -> Scale | None:
    tokens, devices, flops_per_token = tokens_per_step(result), at(result, "plan.devices"), at(result, flops)
    if not (tokens and devices and flops_per_token):
        return None
    return Scale(tokens, devices, flops_per_token, at(result, f"environment.peak.{peak}"))


def _of_step_time(result: Result, formula: Callable[[Scale, float], Number], **choice: str) -> Number:
    scale, time_s = _scale(result, **choice), at(result, "measured.step_time_s")
    return formula(scale, time_s) if scale and time_s else None


def _last(values: Any) -> Number:
    return values[-1] if values else None


def _last_of(path: str) -> Callable[[Result], Number]:
    return lambda result: _last(at(result, path))


def _dropped_fraction(result: Result) -> Number:
    """Of the assignments of all steps: tokens x experts a token x layers with experts."""
    dropped, tokens = at(result, "measured.dropped_tokens"), tokens_per_step(result)
    chosen, layers = at(result, "experiment.model.moe.experts_per_token"), at(result, "experiment.model.layers")
    known = [count for count in dropped or () if count is not None]
    if not (known and tokens and chosen and layers):
        return None
    mixtures = layers - (at(result, "experiment.model.moe.dense_layers") or 0)
    return sum(known) / (len(known) * tokens * chosen * mixtures)


def _validation_loss(result: Result) -> Number:
    evaluations = at(result, "measured.evaluation")
    return evaluations[-1]["loss"] if evaluations else None


def _tokens_per_s(result: Result) -> Number:
    return _of_step_time(result, Scale.tokens_per_s)


def _tokens_per_s_per_device(result: Result) -> Number:
    return _of_step_time(result, lambda scale, time_s: scale.tokens_per_s(time_s) / scale.devices)


def _model_flops_per_s_per_device(result: Result) -> Number:
    return _of_step_time(result, Scale.model_flops_per_s_per_device)


def _mfu(result: Result) -> Number:
    return _of_step_time(result, Scale.mfu)


def _mfu_causal(result: Result) -> Number:
    return _of_step_time(result, Scale.mfu, flops="plan.flops_per_token_causal")


def _mfu_of_library(result: Result) -> Number:
    return _of_step_time(result, Scale.mfu, peak="of_library_flops_per_s_per_device")


def _valid_fraction(result: Result) -> Number:
    valid, seen = at(result, "measured.valid_tokens_seen"), at(result, "measured.tokens_seen")
    return valid / seen if valid is not None and seen else None


def _first_step(result: Result) -> Number:
    startup, compile_s = at(result, "measured.time_parts_s.startup"), at(result, "measured.time_parts_s.compile")
    return None if startup is None or compile_s is None else startup + compile_s


def _path(path: str) -> Callable[[Result], Number]:
    return lambda result: at(result, path)


METRICS = (
    Metric("loss", "nats/token", "last step", _last_of("measured.loss")),
    Metric("grad_norm", "1", "last step, before clipping", _last_of("measured.grad_norm")),
    Metric("validation_loss", "nats/token", "last evaluation", _validation_loss),
    Metric("balance_loss", "1", "last step, over layers with experts: 1 each when even", _last_of("measured.balance_loss")),
    Metric("z_loss", "1", "last step, over layers with experts", _last_of("measured.z_loss")),
    Metric("dropped_tokens", "assignments", "last step, those to an expert without room", _last_of("measured.dropped_tokens")),
    Metric("dropped_fraction", "1", "of all steps' assignments of tokens to experts", _dropped_fraction),
    Metric("tokens_per_s", "tokens/s", "global batch x sequence / median step", _tokens_per_s),
    Metric("tokens_per_s_per_device", "tokens/s", "tokens_per_s / devices", _tokens_per_s_per_device),
    Metric("step_time_s", "s", "median of the timed steps", _path("measured.step_time_s")),
    Metric("bubble_share", "1", "of a stage's time, median of the timed steps", _path("measured.bubble_share")),
    Metric("planned_bubble_share", "1", "arithmetic of the plan", _path("plan.pipeline.bubble_share")),
    Metric("step_time_p10_s", "s", "timed steps", _path("measured.step_time_distribution_s.p10")),
    Metric("step_time_p90_s", "s", "timed steps", _path("measured.step_time_distribution_s.p90")),
    Metric("mfu", "1", "model FLOPs, full attention / (median step x devices x peak)", _mfu),
    Metric("mfu_causal", "1", "the same, half of the attention", _mfu_causal),
    Metric("mfu_of_library", "1", "mfu against the peak of the backend's own library", _mfu_of_library),
    Metric("model_flops_per_s_per_device", "FLOP/s", "model FLOPs / (median step x devices)", _model_flops_per_s_per_device),
    Metric("memory_bytes_per_device", "bytes", "peak of one device, largest process", _path("measured.bytes_per_device.total")),
    Metric("planned_bytes_per_device", "bytes", "arithmetic of the plan", _path("plan.bytes_per_device.total")),
    Metric("resident_bytes", "bytes", "resident memory of all processes", _path("measured.resident_bytes")),
    Metric("compile_s", "s", "compiling ahead of the first step", _path("measured.time_parts_s.compile")),
    Metric("startup_s", "s", "shell to ready to compile", _path("measured.time_parts_s.startup")),
    Metric("first_step_s", "s", "shell to first step: start-up and compilation", _first_step),
    Metric("wall_time_s", "s", "whole job", _path("measured.wall_time_s")),
    Metric("compilations", "1", "of the train step, largest process", _path("measured.compilations")),
    Metric("tokens_seen", "tokens", "last step", _path("measured.tokens_seen")),
    Metric("valid_fraction", "1", "tokens that count in the loss / tokens seen", _valid_fraction),
    Metric(
        "cpu_time_per_step_s", "s", "median of the timed steps, summed over processes", _path("measured.cpu_time_per_step_s")
    ),
)


def values(result: Result) -> dict[str, Number]:
    """Every metric of a result; None where unknown."""
    return {metric.name: metric.of(result) for metric in METRICS}
