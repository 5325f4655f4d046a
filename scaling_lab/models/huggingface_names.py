"""Which tensors of a Hugging Face model hold which of our parameters, and how. Names only: no values, no framework.

The names are those of `state_dict()` in transformers 5, which keeps the experts of a layer in one tensor. Published files
keep them apart (Mixtral: `block_sparse_moe.gate` and `experts.N.w1`, `w3`, `w2` for gate, up, down; Qwen3:
`mlp.experts.N.gate_proj`, ...), and so does the `state_dict()` of transformers 4: `from_pretrained` of 5 joins them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from scaling_lab.models import decoder
from scaling_lab.models.huggingface_config import huggingface_class
from scaling_lab.models.model import Model


@dataclass(frozen=True)
class Pair:
    """One of their tensors and ours that it holds, side by side along its outputs where there are several.

    theirs: name, `{}` standing for the layer
    num_inputs: how many dims of ours are inputs of the product (0: a vector, all dims flattened), first but for the experts
    transposed: theirs is (outputs, inputs), as in `torch.nn.Linear`; ours is (inputs, outputs)
    by_expert: dim 0, after the stack of layers, is the experts in both
    """

    theirs: str
    ours: tuple[str, ...]
    num_inputs: int = 0
    transposed: bool = False
    by_expert: bool = False


@dataclass(frozen=True)
class Tensor:
    """One of their tensors. layer: its place in our stack, None for what lies outside the stacks."""

    name: str
    pair: Pair
    layer: int | None


def tensors(model: Model) -> Iterator[Tensor]:
    """Every tensor of theirs, the embedding first. Raises ConfigError for a model that Hugging Face does not have."""
    pairs = _gpt2_pairs(model) if huggingface_class(model) == "GPT2LMHeadModel" else _llama_like_pairs(model)
    stacks = decoder.stacks(model)
    for pair in pairs:
        numbers = stacks.get(pair.ours[0].partition(".")[0])
        if numbers is None:
            yield Tensor(pair.theirs, pair, None)
        else:
            yield from (Tensor(pair.theirs.format(number), pair, layer) for layer, number in enumerate(numbers))


def _llama_like_pairs(model: Model) -> tuple[Pair, ...]:
    return (
        Pair("model.embed_tokens.weight", ("embed.tokens",), 1),
        *(pair for stack in decoder.stacks(model) for pair in _layer_pairs(model, stack)),
        Pair("model.norm.weight", ("final_norm.scale",)),
        *_head_pair(model),
    )


def _layer_pairs(model: Model, stack: str) -> Iterator[Pair]:
    """Of one layer of a stack."""
    at = "model.layers.{}"
    mixture = model.moe is not None and stack == "layers"
    products = {
        "attention.query": ("self_attn.q_proj", 1),
        "attention.key": ("self_attn.k_proj", 1),
        "attention.value": ("self_attn.v_proj", 1),
        "attention.output": ("self_attn.o_proj", 2),
    }
    dense = {"mlp.gate": ("mlp.gate_proj", 1), "mlp.up": ("mlp.up_proj", 1), "mlp.down": ("mlp.down_proj", 1)}
    yield Pair(f"{at}.input_layernorm.weight", (f"{stack}.attention_norm.scale",))
    yield Pair(f"{at}.post_attention_layernorm.weight", (f"{stack}.mlp_norm.scale",))
    for name, (theirs, num_inputs) in (products if mixture else products | dense).items():
        yield Pair(f"{at}.{theirs}.weight", (f"{stack}.{name}",), num_inputs, transposed=True)
        if model.bias:
            yield Pair(f"{at}.{theirs}.bias", (f"{stack}.{name}_bias",))
    if model.qk_norm:
        yield Pair(f"{at}.self_attn.q_norm.weight", (f"{stack}.attention.query_norm",))
        yield Pair(f"{at}.self_attn.k_norm.weight", (f"{stack}.attention.key_norm",))
    if mixture:
        yield from _mixture_pairs(f"{at}.mlp", f"{stack}.moe")


def _mixture_pairs(at: str, own: str) -> tuple[Pair, ...]:
    return (
        Pair(f"{at}.gate.weight", (f"{own}.router",), 1, transposed=True),
        Pair(f"{at}.experts.gate_up_proj", (f"{own}.gate", f"{own}.up"), 1, transposed=True, by_expert=True),
        Pair(f"{at}.experts.down_proj", (f"{own}.down",), 1, transposed=True, by_expert=True),
    )


def _gpt2_pairs(model: Model) -> tuple[Pair, ...]:
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
        Pair("transformer.wte.weight", ("embed.tokens",), 1),
        Pair("transformer.wpe.weight", ("embed.positions",), 1),
        *(Pair(f"{theirs}.weight", (f"{name}.scale",)) for theirs, name in norms.items()),
        *(Pair(f"{theirs}.bias", (f"{name}.bias",)) for theirs, name in norms.items()),
        *(Pair(f"{at}.{theirs}.weight", ours, n) for theirs, (ours, n) in products.items()),
        *(Pair(f"{at}.{theirs}.bias", tuple(f"{name}_bias" for name in ours)) for theirs, (ours, _) in products.items()),
        *_head_pair(model),
    )


def _head_pair(model: Model) -> tuple[Pair, ...]:
    return () if model.tied_head else (Pair("lm_head.weight", ("head.weight",), 1, transposed=True),)
