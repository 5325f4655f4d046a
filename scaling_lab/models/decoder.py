"""The decoder: its parameters and the FLOPs of a token. Owns names and shapes; knows no framework and no mesh."""

from __future__ import annotations

from scaling_lab.models import latent, moe
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Dim, Parameter, matrix, norm_scale, parameter, stacked


def parameters(model: Model) -> tuple[Parameter, ...]:
    """Every parameter, in the order of the forward pass. Shapes are global; layers are stacked in dim 0."""
    return (
        *_embedding(model),
        *(p for name, layers in stacks(model).items() for p in stacked(name, len(layers), _layer(model, name))),
        *_norm(model, "final_norm"),
        *_head(model),
    )


def stacks(model: Model) -> dict[str, range]:
    """The numbers of the layers in each stack, in order. Layers of one stack have the same parameters.

    `layers`: all, or with `moe.dense_layers` those with experts, which `dense_layers` precede.
    """
    dense = model.moe.dense_layers if model.moe else 0
    first = {"dense_layers": range(dense)} if dense else {}
    return {**first, "layers": range(dense, model.layers)}


def active_size(model: Model) -> int:
    """Number of elements that one token uses: of the routed experts only `experts_per_token`, of the rest everything.

    The embedding and the head count whole, as they do in the published 12.9 B of Mixtral 8x7B (without the embedding it
    would be 12.7) and the 3.3 B of Qwen3-30B-A3B (3.04). DeepSeek-V3's README_WEIGHTS.md says the same of its 36.7 B,
    but only without the embedding does its own config give that: 36.6 B, 37.6 B with it; the paper says 37 B.
    """
    return sum(_active_size(model, p) for p in parameters(model))


def multiplied_size(model: Model) -> int:
    """Number of elements that one token is multiplied with: the active ones but for lookups; a tied head counts too."""
    looked_up = sum(p.size for p in parameters(model) if p.role == "embedding")
    head = model.embed * model.vocab if model.tied_head else 0
    return active_size(model) - looked_up + head


def attention_flops_per_token(model: Model, sequence: int) -> int:
    """FLOPs of attention scores and values of one token, forward and backward, each query meeting all keys.

    6 x layers x heads x (size of a query + size of a value) x sequence; with both of head_dim that is the
    12 x layers x heads x head_dim x sequence of Chowdhery et al. 2022.
    """
    query, value = model.head_dim, model.head_dim
    if model.latent:
        query, value = model.latent.nope_dim + model.latent.rope_dim, model.latent.value_dim
    return 6 * model.layers * model.heads * (query + value) * sequence


def flops_per_token(model: Model, sequence: int, *, causal: bool = False) -> float:
    """Model FLOPs of one token, forward and backward, at a sequence length.

    6 x `multiplied_size` for products with weights, 2 forward and 4 backward per parameter, plus those of attention (half
    of them if `causal`). Source: Chowdhery et al. 2022 (PaLM), appendix B. Deviations: the output head is counted, and of
    the routed experts those that a token is sent to, the router with them, whatever a capacity drops or pads.
    """
    attention = attention_flops_per_token(model, sequence)
    return 6.0 * multiplied_size(model) + (attention / 2 if causal else attention)


def _active_size(model: Model, one: Parameter) -> int:
    if model.moe is None or "experts" not in one.axes:
        return one.size
    return one.size // model.moe.experts * model.moe.experts_per_token


def _layer(model: Model, stack: str) -> tuple[Parameter, ...]:
    """The parameters of one layer of a stack."""
    return (
        *_norm(model, "attention_norm"),
        *(latent.parameters(model, model.latent) if model.latent else _attention(model)),
        *_norm(model, "mlp_norm"),
        *(moe.parameters(model, model.moe) if model.moe and stack == "layers" else _mlp(model)),
    )


def _bias(model: Model, name: str, *dims: Dim) -> tuple[Parameter, ...]:
    return (parameter(name, "bias", "zeros", *dims),) if model.bias else ()


def _embedding(model: Model) -> tuple[Parameter, ...]:
    rows, used = _padded(model, (model.padded_vocab, model.embed), (model.vocab, model.embed))
    tokens = Parameter("embed.tokens", rows, ("vocab", "embed"), "embedding", "normal", model.init_std, used)
    if model.positions != "learned" or model.max_sequence is None:
        return (tokens,)
    shape = (model.max_sequence, model.embed)
    return tokens, Parameter("embed.positions", shape, (None, "embed"), "embedding", "normal", model.init_std)


def _norm(model: Model, name: str) -> tuple[Parameter, ...]:
    embed = Dim("embed", model.embed)
    scale = norm_scale(f"{name}.scale", embed)
    return (scale,) if model.norm == "rms" else (scale, parameter(f"{name}.bias", "norm", "zeros", embed))


def _attention(model: Model) -> tuple[Parameter, ...]:
    embed, head_dim = Dim("embed", model.embed), Dim("head_dim", model.head_dim)
    heads, kv_heads = Dim("heads", model.heads), Dim("kv_heads", model.kv_heads)
    norms = (norm_scale("attention.query_norm", head_dim), norm_scale("attention.key_norm", head_dim))
    return (
        matrix("attention.query", model.init_std, embed, heads, head_dim),
        *_bias(model, "attention.query_bias", heads, head_dim),
        matrix("attention.key", model.init_std, embed, kv_heads, head_dim),
        *_bias(model, "attention.key_bias", kv_heads, head_dim),
        matrix("attention.value", model.init_std, embed, kv_heads, head_dim),
        *_bias(model, "attention.value_bias", kv_heads, head_dim),
        *(norms if model.qk_norm else ()),
        matrix("attention.output", model.residual_std, heads, head_dim, embed),
        *_bias(model, "attention.output_bias", embed),
    )


def _mlp(model: Model) -> tuple[Parameter, ...]:
    embed, mlp = Dim("embed", model.embed), Dim("mlp", model.mlp)
    gate = (matrix("mlp.gate", model.init_std, embed, mlp), *_bias(model, "mlp.gate_bias", mlp))
    return (
        *(gate if model.activation == "swiglu" else ()),
        matrix("mlp.up", model.init_std, embed, mlp),
        *_bias(model, "mlp.up_bias", mlp),
        matrix("mlp.down", model.residual_std, mlp, embed),
        *_bias(model, "mlp.down_bias", embed),
    )


def _head(model: Model) -> tuple[Parameter, ...]:
    if model.tied_head:
        return ()
    columns, used = _padded(model, (model.embed, model.padded_vocab), (model.embed, model.vocab))
    return (Parameter("head.weight", columns, ("embed", "vocab"), "head", "normal", model.init_std, used),)


def _padded(model: Model, shape: tuple[int, ...], used: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """A shape, and the one without padding if that differs."""
    return shape, used if model.padded_vocab > model.vocab else None
