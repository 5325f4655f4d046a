"""Mixtures of experts, latent attention and query-key norms: parameters and FLOPs, with the arithmetic written out."""

import importlib

import pytest
from experiments import experiment

from scaling_lab.errors import ConfigError
from scaling_lab.models import decoder
from scaling_lab.models.huggingface import huggingface_config
from scaling_lab.models.parameters import total_size

MIXTURES = ("tiny_moe", "mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3")


def model(preset="tiny_moe", **sizes):
    return experiment(model=preset, **{f"model.{key}": value for key, value in sizes.items()}).model


def described(preset="tiny_moe", **sizes):
    return {p.name: (p.shape, p.axes) for p in decoder.parameters(model(preset, **sizes))}


def test_mixtral_8x7b_has_the_published_sizes():
    # attention 2 x 4096 x 4096 + 2 x 4096 x 1024; router 4096 x 8; an expert 3 x 4096 x 14336; two norms of 4096
    outside, expert = 41_943_040 + 32_768 + 8_192, 176_160_768
    ends = 2 * 32000 * 4096 + 4096  # embedding, head, the last norm
    # 46.7B in total, 12.9B a token: mistral.ai, "Mixtral of experts" (December 2023); with embedding and head
    assert ends + 32 * (outside + 8 * expert) == 46_702_792_704 == total_size(decoder.parameters(model("mixtral_8x7b")))
    assert ends + 32 * (outside + 2 * expert) == 12_879_925_248 == decoder.active_size(model("mixtral_8x7b"))


def test_qwen3_30b_a3b_has_the_published_sizes():
    # attention 2 x 2048 x 4096 + 2 x 2048 x 512, norms of 128 for queries and keys; router 2048 x 128; two norms of 2048
    outside, expert = 18_874_368 + 256 + 262_144 + 4_096, 3 * 2048 * 768
    ends = 2 * 151936 * 2048 + 2048
    # 30.5B in total, 29.9B without embedding and head, 3.3B activated: model card of Qwen/Qwen3-30B-A3B on Hugging Face
    assert ends + 48 * (outside + 128 * expert) == 30_532_122_624 == total_size(decoder.parameters(model("qwen3_30b_a3b")))
    assert 30_532_122_624 - 2 * 151936 * 2048 == 29_909_792_768
    assert ends + 48 * (outside + 8 * expert) == 3_353_032_704 == decoder.active_size(model("qwen3_30b_a3b"))


def test_deepseek_v3_has_the_published_sizes():
    query = 7168 * 1536 + 1536 + 1536 * 128 * (128 + 64)
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = query + keys_values + 128 * 128 * 7168 + 2 * 7168  # with the two norms of a layer
    expert, router, dense = 3 * 7168 * 2048, 7168 * 256, 3 * 7168 * 18432
    ends = 2 * 129280 * 7168 + 7168
    # 671B without multi-token prediction, 37B activated: arXiv 2412.19437; 36.7B "including 0.9B for Embedding and 0.9B
    # for the output Head": README_WEIGHTS.md of deepseek-ai/DeepSeek-V3, which is what comes out without the embedding
    total = ends + 61 * attention + 3 * dense + 58 * (router + (256 + 1) * expert)
    active = ends + 61 * attention + 3 * dense + 58 * (router + (8 + 1) * expert)
    assert total == 671_026_404_352 == total_size(decoder.parameters(model("deepseek_v3")))
    assert active == 37_552_282_624 == decoder.active_size(model("deepseek_v3"))
    assert active - 129280 * 7168 == 36_625_603_584 == decoder.multiplied_size(model("deepseek_v3"))


@pytest.mark.parametrize("preset", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3"])
def test_transformers_counts_the_same(preset):
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    if preset == "deepseek_v3":  # the defaults of its config are V3's; its biases an expert are buffers and not counted
        model_class, config = transformers.DeepseekV3ForCausalLM, {}
    else:
        config = huggingface_config(model(preset))
        model_class = getattr(transformers, "Qwen3MoeForCausalLM" if model(preset).qk_norm else "MixtralForCausalLM")
    with torch.device("meta"):
        theirs = model_class(model_class.config_class(**config))
    assert sum(p.numel() for p in theirs.parameters()) == total_size(decoder.parameters(model(preset)))


def test_tiny_moe_is_as_active_as_tiny_but_for_the_router():
    # 2 x 256 x 128 + 4 x (2 x 128 x 128 + 2 x 128 x 64 + 128 x 4 + 4 x 3 x 128 x 192 + 2 x 128) + 128
    assert total_size(decoder.parameters(model())) == 1_444_992
    assert decoder.active_size(model()) == 853_120 + 4 * 128 * 4 == decoder.active_size(model("tiny")) + 2_048


def test_a_mixture_stands_in_the_place_of_the_mlp():
    dense, found = described("tiny"), described()
    assert {name: dense[name] for name in dense if ".mlp." not in name} == {
        name: found[name] for name in found if ".moe." not in name
    }
    assert {name: found[name] for name in found if ".moe." in name} == {
        "layers.moe.router": ((4, 128, 4), ("layers", "embed", None)),
        "layers.moe.gate": ((4, 4, 128, 192), ("layers", "experts", "embed", "mlp")),
        "layers.moe.up": ((4, 4, 128, 192), ("layers", "experts", "embed", "mlp")),
        "layers.moe.down": ((4, 4, 192, 128), ("layers", "experts", "mlp", "embed")),
    }
    assert set(found) - set(described(activation="gelu")) == {"layers.moe.gate"}


def test_shared_experts_are_one_mlp_as_wide_as_all_of_them():
    added = {name: it for name, it in described(**{"moe.shared_experts": 3}).items() if "shared" in name}
    assert added == {
        "layers.moe.shared_gate": ((4, 128, 576), ("layers", "embed", "mlp")),
        "layers.moe.shared_up": ((4, 128, 576), ("layers", "embed", "mlp")),
        "layers.moe.shared_down": ((4, 576, 128), ("layers", "mlp", "embed")),
    }
    added = decoder.active_size(model(**{"moe.shared_experts": 3})) - decoder.active_size(model())
    assert added == 4 * 3 * 128 * 576, "every token goes through all of them"


def test_dense_layers_are_a_stack_of_their_own_before_the_others():
    changed = {"moe.dense_layers": 1, "mlp": 400}
    assert decoder.stacks(model(**changed)) == {"dense_layers": range(1), "layers": range(1, 4)}
    assert decoder.stacks(model()) == decoder.stacks(model("tiny")) == {"layers": range(4)}
    found = list(described(**changed).items())
    dense = [(name.removeprefix("dense_"), it) for name, it in found if name.startswith("dense_layers.")]
    assert dense == [it for it in described("tiny", layers=1, mlp=400).items() if it[0].startswith("layers.")]
    mixture = [it for it in found if it[0].startswith("layers.")]
    assert mixture == [it for it in described(layers=3).items() if it[0].startswith("layers.")]
    names = [name.partition(".")[0] for name, _ in found]
    assert list(dict.fromkeys(names)) == ["embed", "dense_layers", "layers", "final_norm", "head"]


@pytest.mark.parametrize("preset", MIXTURES)
def test_names_are_unique_and_both_stacks_are_dim_0(preset):
    found = decoder.parameters(model(preset))
    assert len({p.name for p in found}) == len(found)
    stacks = decoder.stacks(model(preset))
    for p in found:
        stack = p.name.partition(".")[0]
        assert p.stacked == (stack in stacks)
        assert not p.stacked or p.shape[0] == len(stacks[stack])


def test_what_writes_into_the_residual_stream_starts_smaller_by_all_layers_of_both_stacks():
    found = decoder.parameters(model("deepseek_v3"))
    smaller = {p.name for p in found if p.init == "normal" and p.std < 0.006}
    assert {p.std for p in found if p.name in smaller} == {0.006 / (2 * 61) ** 0.5}
    ends = {"attention.output", "mlp.down", "moe.down", "moe.shared_down"}
    assert {name.partition(".")[2] for name in smaller} == ends


def test_query_key_norms_are_over_head_dim_and_start_at_one():
    plain, normed = described("tiny"), described("tiny", qk_norm=True)
    assert {name: normed[name] for name in normed if name not in plain} == {
        "layers.attention.query_norm": ((4, 32), ("layers", "head_dim")),
        "layers.attention.key_norm": ((4, 32), ("layers", "head_dim")),
    }
    norms = [p for p in decoder.parameters(model("tiny", qk_norm=True)) if p.name.endswith(("query_norm", "key_norm"))]
    assert {(p.role, p.init, p.decayed) for p in norms} == {("norm", "ones", False)}


LATENT = {"query_rank": 48, "kv_rank": 24, "rope_dim": 8, "nope_dim": 16, "value_dim": 20}


def test_latent_attention_has_the_parameters_of_deepseek_v3():
    found = described("tiny", latent=LATENT)  # embed 128, heads 4
    assert {name.removeprefix("layers.attention."): it for name, it in found.items() if ".attention." in name} == {
        "query_down": ((4, 128, 48), ("layers", "embed", None)),
        "query_down_norm": ((4, 48), ("layers", None)),
        "query_up": ((4, 48, 4, 24), ("layers", "embed", "heads", None)),
        "kv_down": ((4, 128, 32), ("layers", "embed", None)),
        "kv_down_norm": ((4, 24), ("layers", None)),
        "kv_up": ((4, 24, 4, 36), ("layers", "embed", "heads", None)),
        "output": ((4, 4, 20, 128), ("layers", "heads", None, "embed")),
    }


def test_without_a_query_rank_queries_are_made_from_the_input():
    found = described("tiny", latent={**LATENT, "query_rank": None})
    assert found["layers.attention.query"] == ((4, 128, 4, 24), ("layers", "embed", "heads", None))
    assert not [name for name in found if "query_" in name]


def test_flops_count_the_experts_that_a_token_uses_and_the_router():
    # tiny_moe: of 855,168 active parameters 256 x 128 are looked up; attention as in tiny: 12 x 4 x 4 x 32 x 64 = 393,216
    assert decoder.multiplied_size(model()) == 855_168 - 32_768 == 822_400
    assert decoder.flops_per_token(model(), 64) == 6 * 822_400 + 393_216
    assert decoder.flops_per_token(model(), 64, causal=True) == 6 * 822_400 + 393_216 / 2
    more = model(**{"moe.experts": 8})
    assert decoder.flops_per_token(more, 64) - decoder.flops_per_token(model(), 64) == 6 * 4 * 128 * 4, "the wider router"
    assert decoder.flops_per_token(model(**{"moe.capacity_factor": 1.0}), 64) == decoder.flops_per_token(model(), 64)


def test_flops_of_latent_attention_go_by_the_sizes_of_queries_and_values():
    # 2 forward and 4 backward for each of heads x (16 + 8) of scores and heads x 20 of values, 4 layers, 64 tokens
    assert decoder.attention_flops_per_token(model("tiny", latent=LATENT), 64) == 6 * 4 * 4 * (24 + 20) * 64
    # DeepSeek-V3: 6 x 61 x 128 x (192 + 128) x 4096, a fifth of a token's work
    attention = 6 * 61 * 128 * 320 * 4096
    assert decoder.attention_flops_per_token(model("deepseek_v3"), 4096) == attention == 61_404_610_560
    assert decoder.flops_per_token(model("deepseek_v3"), 4096) == 6 * 36_625_603_584 + attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe.experts": 0}, r"model\.moe\.experts=0: must be greater than or equal to 1"),
        ({"moe.shared_experts": -1}, r"model\.moe\.shared_experts=-1: must be greater than or equal to 0"),
        ({"moe.balance_loss": -0.1}, r"model\.moe\.balance_loss=-0\.1: must be greater than or equal to 0"),
        ({"moe.capacity_factor": 0.0}, r"model\.moe\.capacity_factor=0\.0: must be greater than 0"),
        ({"moe.routing": "topk_sofmax"}, r"model\.moe\.routing='topk_sofmax': .* \(did you mean topk_softmax\?\)"),
        ({"moe.expert": 8}, r"model\.moe\.expert: unknown key \(did you mean experts\?\)"),
        ({"latent": {**LATENT, "kv_rank": None}}, r"model\.latent\.kv_rank=null: must be a valid integer"),
        ({"qk_norm": None}, r"model\.qk_norm=null: must be a valid boolean"),
    ],
)
def test_a_wrong_key_is_named_with_its_path(changes, message):
    with pytest.raises(ConfigError, match=message):
        model(**changes)
