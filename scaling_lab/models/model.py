"""The sizes and switches of a transformer, as the `model` config group gives them. No framework, no mesh."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

#: Every config dataclass: unknown keys refused, no silent conversion of types, no infinite numbers.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies divided by `factor`, a smooth ramp between the two borders."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_sequence: Size


@dataclass(frozen=True, config=STRICT)
class Model:
    """A pre-norm decoder. Sizes carry the logical axes' names.

    max_sequence: rows of the learned position table, and the longest sequence allowed with it; null without one
    init_std: standard deviation of the initial weights; residual outputs are scaled by 1 / sqrt(2 x layers)
    """

    name: str
    family: Literal["decoder"]
    layers: Size
    embed: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    mlp: Size
    vocab: Annotated[int, Field(ge=2)]
    norm: Literal["rms", "layer"]
    norm_eps: Positive
    positions: Literal["rope", "learned"]
    rope_theta: Positive
    rope_scaling: RopeScaling | None
    max_sequence: Size | None
    activation: Literal["swiglu", "gelu"]
    bias: bool
    tied_head: bool
    init_std: Positive
