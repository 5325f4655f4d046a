"""Our parameters under the names and shapes of Hugging Face `transformers`, and back. NumPy only; imports no framework.

For `LlamaForCausalLM`, `Qwen3ForCausalLM`, `MixtralForCausalLM`, `Qwen3MoeForCausalLM` and `GPT2LMHeadModel`. Owns the
conversion of values; must not know meshes, backends or files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from scaling_lab.errors import ConfigError
from scaling_lab.models import decoder
from scaling_lab.models.huggingface_config import huggingface_class, huggingface_config
from scaling_lab.models.huggingface_names import Pair, tensors
from scaling_lab.models.model import Model
from scaling_lab.models.parameters import Parameter

__all__ = ["from_huggingface", "huggingface_class", "huggingface_config", "to_huggingface"]

#: The head's name, also where it is the embedding.
HEAD = "lm_head.weight"


def to_huggingface(model: Model, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as `state_dict()` of the Hugging Face model names them; a tied head appears under both of its names.

    weights: every parameter of the model by our name, global shape, layers stacked. Dtypes are kept.
    Raises ConfigError for a missing, left-over or wrongly shaped array, or a model that Hugging Face does not have.
    """
    parameters = decoder.parameters(model)
    _check({parameter.name: parameter.shape for parameter in parameters}, weights, "the weights")
    weights = {p.name: weights[p.name][tuple(slice(size) for size in p.used_shape)] for p in parameters}
    model = replace(model, vocab_multiple=1)
    state: dict[str, np.ndarray] = {}
    for tensor in tensors(model):
        pair = tensor.pair
        parts = [weights[name] if tensor.layer is None else weights[name][tensor.layer] for name in pair.ours]
        flat = np.concatenate([part.reshape(_flat_shape(part.shape, pair)) for part in parts], axis=-1)
        state[tensor.name] = np.ascontiguousarray(flat.swapaxes(-1, -2) if pair.transposed else flat)
    if model.tied_head:
        state[HEAD] = state[_embedding(model)]
    return state


def from_huggingface(model: Model, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `to_huggingface`. The name of a tied head may be absent; where it is there, it must equal the embedding.

    Raises ConfigError for a missing, left-over or wrongly shaped tensor, each named, or a head that is not tied after all.
    """
    padded, model = decoder.parameters(model), replace(model, vocab_multiple=1)
    parameters = {parameter.name: parameter for parameter in decoder.parameters(model)}
    tied = state.get(HEAD) if model.tied_head else None
    if tied is not None:
        state = {name: tensor for name, tensor in state.items() if name != HEAD}
    _check({tensor.name: _their_shape(tensor.pair, parameters) for tensor in tensors(model)}, state, "the tensors")
    if tied is not None and not np.array_equal(tied, state[_embedding(model)]):
        raise ConfigError(f"{HEAD} differs from the embedding, but model.tied_head=true: set model.tied_head=false.")
    weights: dict[str, np.ndarray] = {}
    for tensor in tensors(model):
        pair, values = tensor.pair, state[tensor.name]
        flat = values.swapaxes(-1, -2) if pair.transposed else values
        sizes = [_flat_shape(_layer_shape(parameters[name]), pair)[-1] for name in pair.ours]
        for name, part in zip(pair.ours, np.split(flat, np.cumsum(sizes)[:-1], axis=-1), strict=True):
            whole = weights.setdefault(name, np.empty(parameters[name].shape, values.dtype))
            place = whole if tensor.layer is None else whole[tensor.layer]
            place[...] = part.reshape(place.shape)
    return {p.name: _pad(weights[p.name], p.shape) for p in padded}


def _pad(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros at the end of each dim that is shorter than wanted."""
    missing = [(0, wanted - size) for size, wanted in zip(values.shape, shape, strict=True)]
    return np.pad(values, missing) if values.shape != shape else values


def _embedding(model: Model) -> str:
    return next(tensors(model)).name


def _layer_shape(parameter: Parameter) -> tuple[int, ...]:
    return parameter.shape[1:] if parameter.stacked else parameter.shape


def _flat_shape(shape: tuple[int, ...], pair: Pair) -> tuple[int, ...]:
    """Shape of one layer of a parameter as (inputs, outputs), or as a vector; the experts before."""
    experts, shape = (shape[:1], shape[1:]) if pair.by_expert else ((), shape)
    inputs, outputs = shape[: pair.num_inputs], shape[pair.num_inputs :]
    return (*experts, math.prod(inputs), math.prod(outputs)) if pair.num_inputs else (*experts, math.prod(outputs))


def _their_shape(pair: Pair, parameters: Mapping[str, Parameter]) -> tuple[int, ...]:
    shapes = [_flat_shape(_layer_shape(parameters[name]), pair) for name in pair.ours]
    shape = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
    return (*shape[:-2], shape[-1], shape[-2]) if pair.transposed else shape


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
