"""The sizes and switches of a transformer, as the `model` config group gives them. No framework, no mesh."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

#: Every config dataclass: unknown keys refused, no silent conversion of types, no infinite numbers.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

#: A name goes into titles and into the names of folders: letters, digits, and . _ + - inside.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)]
Size = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Coefficient = Annotated[float, Field(ge=0)]


@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """Llama 3.1's frequency scaling: low frequencies divided by `factor`, a smooth ramp between the two borders."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_sequence: Size


@dataclass(frozen=True, config=STRICT)
class Moe:
    """A mixture of experts in place of the mlp; `models.moe` says what is computed.

    experts: routed ones; experts_per_token: how many of them a token is sent to; expert_mlp: hidden width of one
    shared_experts: how many every token goes through beside the routed ones, each as wide as one
    dense_layers: that many of the first layers have the dense mlp of width `model.mlp` instead
    routing: what weighs a token's experts. `softmax_topk`: softmax over all experts, then the top k as they are;
    `softmax_topk_normalised`: the same, divided by their sum; `topk_softmax`: top k of the logits, softmax over those
    capacity_factor: room of an expert over its even share of a sequence's tokens; null: no token is ever dropped
    balance_loss, z_loss: coefficients of the router's two losses, 0 for none
    routed_scale: what multiplies the routed experts' sum, but not the shared experts
    """

    experts: Size
    experts_per_token: Size
    expert_mlp: Size
    shared_experts: Count
    dense_layers: Count
    routing: Literal["softmax_topk", "softmax_topk_normalised", "topk_softmax"]
    capacity_factor: Positive | None
    balance_loss: Coefficient
    z_loss: Coefficient
    routed_scale: Positive


@dataclass(frozen=True, config=STRICT)
class Latent:
    """Latent attention: keys and values are made from one narrow vector a token; `models.latent` says what is computed.

    query_rank: width of the queries' narrow vector, null where they are made from the input; kv_rank: of keys and values
    nope_dim, rope_dim: the parts of a head's query and key without positions and turned by them; value_dim: of its value
    """

    query_rank: Size | None
    kv_rank: Size
    rope_dim: Size
    nope_dim: Size
    value_dim: Size


@dataclass(frozen=True, config=STRICT)
class Model:
    """A pre-norm decoder. Sizes carry the logical axes' names.

    vocab_multiple: embedding and head have rows for a multiple of this many tokens; those beyond vocab never take part
    mlp: hidden width of the dense mlp; unused where `moe` leaves no dense layer
    qk_norm: RMSNorm over head_dim of each head's query and key, before their rotation
    latent: null for attention with keys and values of their own; moe: null for a dense model
    max_sequence: rows of the learned position table, and the longest sequence allowed with it; null without one
    init_std: standard deviation of the initial weights; residual outputs are scaled by 1 / sqrt(2 x layers)
    """

    name: Name
    family: Literal["decoder"]
    layers: Size
    embed: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    mlp: Size
    vocab: Annotated[int, Field(ge=2)]
    vocab_multiple: Size
    norm: Literal["rms", "layer"]
    norm_eps: Positive
    positions: Literal["rope", "learned"]
    rope_theta: Positive
    rope_scaling: RopeScaling | None
    max_sequence: Size | None
    activation: Literal["swiglu", "gelu"]
    bias: bool
    qk_norm: bool
    tied_head: bool
    latent: Latent | None
    moe: Moe | None
    init_std: Positive

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding and columns of the head."""
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def residual_std(self) -> float:
        """Standard deviation of the matrices that write into the residual stream."""
        return self.init_std / math.sqrt(2 * self.layers)
