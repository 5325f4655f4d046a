"""Our parameters under the names and shapes of Hugging Face `transformers`, and back. NumPy only; imports no framework.

Owns the correspondence for `LlamaForCausalLM` and `GPT2LMHeadModel`; must not know meshes, backends or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scaling_lab.errors import ConfigError
from scaling_lab.models import decoder
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter


@dataclass(frozen=True)
class _Pair:
    """One of their tensors and ours that it holds, side by side along its outputs where there are several.

    theirs: name, `{}` standing for the layer
    num_inputs: how many leading dims of ours are inputs of the product (0: a vector, all dims flattened)
    transposed: theirs is (outputs, inputs), as in `torch.nn.Linear`; ours is (inputs, outputs)
    """

    theirs: str
    ours: tuple[str, ...]
    num_inputs: int = 0
    transposed: bool = False


def to_huggingface(model: Model, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as `state_dict()` of the Hugging Face model names them; a tied head appears under both of its names.

    weights: every parameter of the model by our name, global shape, layers stacked. Dtypes are kept.
    Raises ConfigError for a missing, left-over or wrongly shaped array, or a model that Hugging Face does not have.
    """
    parameters = {parameter.name: parameter for parameter in decoder.parameters(model)}
    _check({name: parameter.shape for name, parameter in parameters.items()}, weights, "the weights")
    state: dict[str, np.ndarray] = {}
    for pair, layer in _tensors(model):
        parts = [weights[name] if layer is None else weights[name][layer] for name in pair.ours]
        flat = np.concatenate([_flat(part, pair.num_inputs) for part in parts], axis=-1)
        state[pair.theirs.format(layer)] = np.ascontiguousarray(flat.T if pair.transposed else flat)
    if model.tied_head:
        state["lm_head.weight"] = state[_pairs(model)[0].theirs]
    return state


def from_huggingface(model: Model, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `to_huggingface`. The name of a tied head may be absent; where it is there, it must equal the embedding.

    Raises ConfigError for a missing, left-over or wrongly shaped tensor, each named, or a head that is not tied after all.
    """
    parameters = {parameter.name: parameter for parameter in decoder.parameters(model)}
    tied = state.get("lm_head.weight") if model.tied_head else None
    if tied is not None:
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    expected = {pair.theirs.format(layer): _their_shape(pair, parameters) for pair, layer in _tensors(model)}
    _check(expected, state, "the tensors")
    if tied is not None and not np.array_equal(tied, state[_pairs(model)[0].theirs]):
        raise ConfigError("lm_head.weight differs from the embedding, but model.tied_head=true: set model.tied_head=false.")
    weights: dict[str, np.ndarray] = {}
    for pair, layer in _tensors(model):
        tensor = state[pair.theirs.format(layer)]
        flat = tensor.T if pair.transposed else tensor
        sizes = [_flat_shape(parameters[name], pair.num_inputs)[-1] for name in pair.ours]
        for name, part in zip(pair.ours, np.split(flat, np.cumsum(sizes)[:-1], axis=-1), strict=True):
            whole = weights.setdefault(name, np.empty(parameters[name].shape, tensor.dtype))
            place = whole if layer is None else whole[layer]
            place[...] = part.reshape(place.shape)
    return weights


def huggingface_config(model: Model) -> dict[str, Any]:
    """Keyword arguments of `LlamaConfig` or `GPT2Config` for the model; which tokens begin and end a text is not known here.

    Raises ConfigError where neither class can describe the model.
    """
    return _llama_config(model) if _is_llama(model) else _gpt2_config(model)


def _llama_config(model: Model) -> dict[str, Any]:
    scaling = model.rope_scaling
    longest = round(scaling.original_sequence * scaling.factor) if scaling else model.max_sequence or 1 << 17
    return {
        "hidden_size": model.embed,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": longest,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
        "tie_word_embeddings": model.tied_head,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    if model.rope_scaling is None:
        return None
    scaling = asdict(model.rope_scaling)
    original = scaling.pop("original_sequence")
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}


def _gpt2_config(model: Model) -> dict[str, Any]:
    _check_gpt2(model)
    return {
        "n_embd": model.embed,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.mlp,
        "vocab_size": model.vocab,
        "n_positions": model.max_sequence,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": model.tied_head,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _is_llama(model: Model) -> bool:
    return (model.norm, model.positions, model.activation) == ("rms", "rope", "swiglu")


def _check_gpt2(model: Model) -> None:
    """Raise ConfigError listing the switches that keep a model from being a GPT2LMHeadModel."""
    wanted = {
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "kv_heads": model.heads,
        "head_dim": model.embed / model.heads,
    }
    wrong = [f"model.{key}={getattr(model, key)}" for key, value in wanted.items() if getattr(model, key) != value]
    if model.max_sequence is None:
        wrong.append("model.max_sequence=null")
    if wrong:
        raise ConfigError(
            f"model `{model.name}` has no counterpart in Hugging Face: LlamaForCausalLM needs model.norm=rms, "
            f"model.positions=rope and model.activation=swiglu; GPT2LMHeadModel does not go with {', '.join(wrong)}."
        )


def _pairs(model: Model) -> tuple[_Pair, ...]:
    """Every pair, the embedding first, for one layer of the stack and for what lies outside it."""
    if _is_llama(model):
        return _llama_pairs(model)
    _check_gpt2(model)
    return _gpt2_pairs(model)


def _llama_pairs(model: Model) -> tuple[_Pair, ...]:
    at, own = "model.layers.{}", "layers"
    products = {
        "attention.query": ("self_attn.q_proj", 1),
        "attention.key": ("self_attn.k_proj", 1),
        "attention.value": ("self_attn.v_proj", 1),
        "attention.output": ("self_attn.o_proj", 2),
        "mlp.gate": ("mlp.gate_proj", 1),
        "mlp.up": ("mlp.up_proj", 1),
        "mlp.down": ("mlp.down_proj", 1),
    }
    return (
        _Pair("model.embed_tokens.weight", ("embed.tokens",), 1),
        _Pair(f"{at}.input_layernorm.weight", (f"{own}.attention_norm.scale",)),
        _Pair(f"{at}.post_attention_layernorm.weight", (f"{own}.mlp_norm.scale",)),
        *(_Pair(f"{at}.{theirs}.weight", (f"{own}.{name}",), n, True) for name, (theirs, n) in products.items()),
        *(_Pair(f"{at}.{theirs}.bias", (f"{own}.{name}_bias",)) for name, (theirs, _) in products.items() if model.bias),
        _Pair("model.norm.weight", ("final_norm.scale",)),
        *_head_pair(model),
    )


def _gpt2_pairs(model: Model) -> tuple[_Pair, ...]:
    at, own = "transformer.h.{}", "layers"
    fused = tuple(f"{own}.attention.{name}" for name in ("query", "key", "value"))
    products = {
        "attn.c_attn": (fused, 1),
        "attn.c_proj": ((f"{own}.attention.output",), 2),
        "mlp.c_fc": ((f"{own}.mlp.up",), 1),
        "mlp.c_proj": ((f"{own}.mlp.down",), 1),
    }
    norms = {f"{at}.ln_1": f"{own}.attention_norm", f"{at}.ln_2": f"{own}.mlp_norm", "transformer.ln_f": "final_norm"}
    return (
        _Pair("transformer.wte.weight", ("embed.tokens",), 1),
        _Pair("transformer.wpe.weight", ("embed.positions",), 1),
        *(_Pair(f"{theirs}.weight", (f"{name}.scale",)) for theirs, name in norms.items()),
        *(_Pair(f"{theirs}.bias", (f"{name}.bias",)) for theirs, name in norms.items()),
        *(_Pair(f"{at}.{theirs}.weight", ours, n) for theirs, (ours, n) in products.items()),
        *(_Pair(f"{at}.{theirs}.bias", tuple(f"{name}_bias" for name in ours)) for theirs, (ours, _) in products.items()),
        *_head_pair(model),
    )


def _head_pair(model: Model) -> tuple[_Pair, ...]:
    return () if model.tied_head else (_Pair("lm_head.weight", ("head.weight",), 1, True),)


def _tensors(model: Model) -> Iterator[tuple[_Pair, int | None]]:
    """Every tensor of theirs: its pair and its layer, None for what lies outside the stack."""
    for pair in _pairs(model):
        layers = range(model.layers) if "{}" in pair.theirs else (None,)
        yield from ((pair, layer) for layer in layers)


def _flat(part: np.ndarray, num_inputs: int) -> np.ndarray:
    return part.reshape(int(np.prod(part.shape[:num_inputs])), -1) if num_inputs else part.reshape(-1)


def _flat_shape(parameter: Parameter, num_inputs: int) -> tuple[int, ...]:
    """Shape of one layer of a parameter as (inputs, outputs), or as a vector."""
    shape = parameter.shape[1:] if parameter.stacked else parameter.shape
    outputs = int(np.prod(shape[num_inputs:]))
    return (int(np.prod(shape[:num_inputs])), outputs) if num_inputs else (outputs,)


def _their_shape(pair: _Pair, parameters: Mapping[str, Parameter]) -> tuple[int, ...]:
    shapes = [_flat_shape(parameters[name], pair.num_inputs) for name in pair.ours]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return shape[::-1] if pair.transposed else shape


def _check(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, np.ndarray], what: str) -> None:
    faults = [f"{name}: missing" for name in expected if name not in found]
    faults += [f"{name}: not a tensor of this model" for name in found if name not in expected]
    faults += [
        f"{name}: shape {found[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    if faults:
        raise ConfigError(f"{what} do not fit the model:\n" + "\n".join(f"  {fault}" for fault in faults))
