"""The dense decoder: its parameters and the FLOPs of a token. Owns names and shapes; knows no framework and no mesh."""

from __future__ import annotations

import math

from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Init, Parameter, Role


def parameters(model: Model) -> tuple[Parameter, ...]:
    """Every parameter, in the order of the forward pass. Shapes are global; layers are stacked in dim 0."""
    return (
        *_embedding(model),
        *_norm(model, "layers.attention_norm"),
        *_attention(model),
        *_norm(model, "layers.mlp_norm"),
        *_mlp(model),
        *_norm(model, "final_norm"),
        *_head(model),
    )


def flops_per_token(model: Model, sequence: int, *, causal: bool = False) -> float:
    """Model FLOPs of one token, forward and backward, at a sequence length.

    6 x (parameters but for the embedding lookups; the head counts also when tied) for products with weights, 2 forward and
    4 backward per parameter, plus 12 x layers x heads x head_dim x sequence for attention scores and values (half of
    it if `causal`). Source: Chowdhery et al. 2022 (PaLM), appendix B. Deviation: the output head is counted.
    """
    looked_up = sum(p.size for p in parameters(model) if p.role == "embedding")
    head = model.embed * model.vocab if model.tied_head else 0
    multiplied = sum(p.size for p in parameters(model)) - looked_up + head
    attention = 12 * model.layers * model.heads * model.head_dim * sequence
    return 6.0 * multiplied + (attention / 2 if causal else attention)


def _parameter(model: Model, name: str, role: Role, init: Init, std: float, axes: tuple[str, ...]) -> Parameter:
    stack = ("layers",) if name.startswith("layers.") else ()
    axes = (*stack, *axes)
    return Parameter(name, tuple(getattr(model, axis) for axis in axes), axes, role, init, std)


def _bias(model: Model, name: str, *axes: str) -> tuple[Parameter, ...]:
    return (_parameter(model, name, "bias", "zeros", 0.0, axes),) if model.bias else ()


def _embedding(model: Model) -> tuple[Parameter, ...]:
    tokens = Parameter("embed.tokens", (model.vocab, model.embed), ("vocab", "embed"), "embedding", "normal", model.init_std)
    if model.positions != "learned" or model.max_sequence is None:
        return (tokens,)
    shape = (model.max_sequence, model.embed)
    return tokens, Parameter("embed.positions", shape, (None, "embed"), "embedding", "normal", model.init_std)


def _norm(model: Model, name: str) -> tuple[Parameter, ...]:
    scale = _parameter(model, f"{name}.scale", "norm", "ones", 0.0, ("embed",))
    if model.norm == "rms":
        return (scale,)
    return scale, _parameter(model, f"{name}.bias", "norm", "zeros", 0.0, ("embed",))


def _matrix(model: Model, name: str, *axes: str, residual: bool = False) -> Parameter:
    std = model.init_std / math.sqrt(2 * model.layers) if residual else model.init_std
    return _parameter(model, name, "matrix", "normal", std, axes)


def _attention(model: Model) -> tuple[Parameter, ...]:
    at = "layers.attention"
    return (
        _matrix(model, f"{at}.query", "embed", "heads", "head_dim"),
        *_bias(model, f"{at}.query_bias", "heads", "head_dim"),
        _matrix(model, f"{at}.key", "embed", "kv_heads", "head_dim"),
        *_bias(model, f"{at}.key_bias", "kv_heads", "head_dim"),
        _matrix(model, f"{at}.value", "embed", "kv_heads", "head_dim"),
        *_bias(model, f"{at}.value_bias", "kv_heads", "head_dim"),
        _matrix(model, f"{at}.output", "heads", "head_dim", "embed", residual=True),
        *_bias(model, f"{at}.output_bias", "embed"),
    )


def _mlp(model: Model) -> tuple[Parameter, ...]:
    at = "layers.mlp"
    gate = (_matrix(model, f"{at}.gate", "embed", "mlp"), *_bias(model, f"{at}.gate_bias", "mlp"))
    return (
        *(gate if model.activation == "swiglu" else ()),
        _matrix(model, f"{at}.up", "embed", "mlp"),
        *_bias(model, f"{at}.up_bias", "mlp"),
        _matrix(model, f"{at}.down", "mlp", "embed", residual=True),
        *_bias(model, f"{at}.down_bias", "embed"),
    )


def _head(model: Model) -> tuple[Parameter, ...]:
    if model.tied_head:
        return ()
    return (Parameter("head.weight", (model.embed, model.vocab), ("embed", "vocab"), "head", "normal", model.init_std),)
