"""Which class of Hugging Face `transformers` computes a model, and the arguments of its config. Imports no framework.

Owns the choice of the class and why none fits; must not know tensors.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from scaling_lab.errors import ConfigError
from scaling_lab.models.model import Model, Moe

#: What every class but GPT-2's asks of a model.
LLAMA_LIKE = {"norm": "rms", "positions": "rope", "activation": "swiglu"}


def huggingface_class(model: Model) -> str:
    """Name of the class that computes the model.

    Raises ConfigError where none does, naming the keys in the way: no class has a capacity, so every token must be kept.
    The router's losses are the lab's own and not asked about.
    """
    if any(getattr(model, key) != value for key, value in LLAMA_LIKE.items()):
        _check_gpt2(model)
        return "GPT2LMHeadModel"
    if model.moe is None:
        name = "Qwen3ForCausalLM" if model.qk_norm else "LlamaForCausalLM"
    else:
        name = "Qwen3MoeForCausalLM" if model.qk_norm else "MixtralForCausalLM"
    _check_llama_like(model, name)
    return name


def huggingface_config(model: Model) -> dict[str, Any]:
    """Keyword arguments of the class's config for the model; which tokens begin and end a text is not known here.

    Raises ConfigError where no class can compute the model.
    """
    name = huggingface_class(model)
    if name == "GPT2LMHeadModel":
        return _gpt2_config(model)
    config = _llama_config(model)
    return config if model.moe is None else {**config, **_moe_config(model.moe, name)}


def _check_gpt2(model: Model) -> None:
    """Raise ConfigError listing the switches that keep a model from being a GPT2LMHeadModel."""
    wanted = {
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "qk_norm": False,
        "kv_heads": model.heads,
        "head_dim": model.embed / model.heads,
    }
    wrong = [*_differing("model", model, wanted), *_present(model, "latent", "moe")]
    if model.max_sequence is None:
        wrong.append("model.max_sequence=null")
    if wrong:
        raise ConfigError(
            f"model `{model.name}` has no counterpart in Hugging Face: LlamaForCausalLM and its like need model.norm=rms, "
            f"model.positions=rope and model.activation=swiglu; GPT2LMHeadModel does not go with {', '.join(wrong)}."
        )


def _check_llama_like(model: Model, name: str) -> None:
    """Raise ConfigError listing what keeps a model from being of the class, each with the change that lets it."""
    faults = _present(model, "latent")
    if name != "LlamaForCausalLM":  # the others have no biases, or only some of ours
        faults |= _differing("model", model, {"bias": False})
    if model.moe:
        wanted: dict[str, Any] = {"shared_experts": 0, "routed_scale": 1.0, "capacity_factor": None}
        if name == "MixtralForCausalLM":
            weighed = "softmax_topk_normalised" if model.moe.routing == "softmax_topk" else model.moe.routing
            wanted |= {"dense_layers": 0, "routing": weighed}
        faults |= _differing("model.moe", model.moe, wanted)
    if faults:
        raise ConfigError(
            f"model `{model.name}` has no counterpart in Hugging Face: {name} does not go with {', '.join(faults)}. "
            f"Set {' '.join(faults.values())}."
        )


def _differing(key: str, group: Model | Moe, wanted: dict[str, Any]) -> dict[str, str]:
    """What is set otherwise than wanted -> what to set."""
    found = {name: getattr(group, name) for name in wanted}
    return {
        f"{key}.{name}={_yaml(value)}": f"{key}.{name}={_yaml(wanted[name])}"
        for name, value in found.items()
        if value != wanted[name]
    }


def _present(model: Model, *groups: str) -> dict[str, str]:
    return {f"model.{name}": f"model.{name}=null" for name in groups if getattr(model, name) is not None}


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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


def _moe_config(moe: Moe, name: str) -> dict[str, Any]:
    if name == "MixtralForCausalLM":
        return {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.experts_per_token,
            "intermediate_size": moe.expert_mlp,
        }
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.expert_mlp,
        "norm_topk_prob": moe.routing != "softmax_topk",
        "mlp_only_layers": list(range(moe.dense_layers)),
    }


def _rope_scaling(model: Model) -> dict[str, Any] | None:
    if model.rope_scaling is None:
        return None
    scaling = asdict(model.rope_scaling)
    original = scaling.pop("original_sequence")
    return {"rope_type": "llama3", **scaling, "original_max_position_embeddings": original}


def _gpt2_config(model: Model) -> dict[str, Any]:
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
