"""Parameters and FLOPs of every preset, against published totals and against arithmetic written out."""

import math

import pytest
from experiments import experiment

from scaling_lab.models import decoder
from scaling_lab.models.parameters import total_size

LLAMA_VOCAB = 128256  # 128,000 of tiktoken's and the reserved ones


def model(preset="tiny", **sizes):
    return experiment(model=preset, **{f"model.{key}": value for key, value in sizes.items()}).model


def shapes(**keys):
    return {p.name: p.shape for p in decoder.parameters(model(**keys))}


def llama(layers, embed, heads, kv_heads, mlp, head_dim, tied):
    """Embedding and head; per layer queries and output, keys and values, three mlp matrices, two norms; the last norm."""
    embedding = LLAMA_VOCAB * embed * (1 if tied else 2)
    attention = 2 * embed * heads * head_dim + 2 * embed * kv_heads * head_dim
    return embedding + layers * (attention + 3 * embed * mlp + 2 * embed) + embed


@pytest.mark.parametrize(
    ("preset", "published", "counted"),
    [
        # 128256 x 2048 + 16 x (2 x 2048 x 2048 + 2 x 2048 x 512 + 3 x 2048 x 8192 + 2 x 2048) + 2048
        ("llama3_1b", 1_235_814_400, llama(16, 2048, 32, 8, 8192, 64, tied=True)),
        ("llama3_8b", 8_030_261_248, llama(32, 4096, 32, 8, 14336, 128, tied=False)),
        ("llama3_70b", 70_553_706_496, llama(80, 8192, 64, 8, 28672, 128, tied=False)),
        ("llama3_405b", 405_853_388_800, llama(126, 16384, 128, 8, 53248, 128, tied=False)),
    ],
)
def test_llama_presets_have_the_published_number_of_parameters(preset, published, counted):
    assert counted == published
    assert total_size(decoder.parameters(model(preset))) == published


def test_gpt2_small_has_the_published_number_of_parameters():
    # tokens 50257 x 768, positions 1024 x 768; per layer: attention 4 x (768 x 768 + 768), mlp 768 x 3072 + 3072 + 3072 x 768
    # + 768, two norms of 2 x 768; the last norm 2 x 768; the head is the embedding.
    layer = 4 * (768 * 768 + 768) + 768 * 3072 + 3072 + 3072 * 768 + 768 + 4 * 768
    assert 50257 * 768 + 1024 * 768 + 12 * layer + 2 * 768 == 124_439_808
    assert total_size(decoder.parameters(model("gpt2_124m"))) == 124_439_808


def test_the_tiny_presets_have_the_parameters_that_their_headers_say():
    # 2 x 256 x 128 + 4 x (2 x 128 x 128 + 2 x 128 x 64 + 3 x 128 x 384 + 2 x 128) + 128
    assert total_size(decoder.parameters(model("tiny"))) == 853_120
    # (256 + 64) x 128 + 4 x (4 x (128 x 128 + 128) + 128 x 512 + 512 + 512 x 128 + 128 + 4 x 128) + 2 x 128
    assert total_size(decoder.parameters(model("tiny_gpt2"))) == 834_304


def test_shapes_carry_the_sizes_of_their_axes():
    found = shapes(embed=96, heads=6, kv_heads=3, head_dim=20, mlp=100, layers=3)
    assert found["layers.attention.query"] == (3, 96, 6, 20)
    assert found["layers.attention.key"] == (3, 96, 3, 20)
    assert found["layers.attention.output"] == (3, 6, 20, 96)
    assert found["layers.mlp.down"] == (3, 100, 96)
    assert found["head.weight"] == (96, 256)


def test_switches_add_and_remove_parameters():
    plain = set(shapes())
    assert plain - set(shapes(tied_head=True)) == {"head.weight"}
    assert plain - set(shapes(activation="gelu")) == {"layers.mlp.gate"}
    assert set(shapes(norm="layer")) - plain == {"layers.attention_norm.bias", "layers.mlp_norm.bias", "final_norm.bias"}
    assert set(shapes(positions="learned", max_sequence=32)) - plain == {"embed.positions"}
    products = [f"attention.{name}" for name in ("query", "key", "value", "output")] + ["mlp.gate", "mlp.up", "mlp.down"]
    assert set(shapes(bias=True)) - plain == {f"layers.{name}_bias" for name in products}


def test_names_are_unique_and_the_layer_stack_is_dim_0():
    for preset in ("tiny", "tiny_gpt2"):
        found = decoder.parameters(model(preset))
        assert len({p.name for p in found}) == len(found)
        assert {p.name for p in found if p.stacked} == {p.name for p in found if p.name.startswith("layers.")}
        assert all(p.shape[0] == 4 for p in found if p.stacked)


def test_decay_applies_to_matrices_and_tables_but_not_to_norms_and_biases():
    found = decoder.parameters(model("tiny_gpt2"))
    spared = {p.name for p in found if not p.decayed}
    assert spared == {p.name for p in found if p.name.endswith(("_bias", "norm.bias", "norm.scale"))}
    assert "layers.attention.query_bias" in spared  # three dims with the stack: a rule by dims would decay it


def test_residual_outputs_start_smaller_by_the_square_root_of_twice_the_layers():
    found = {p.name: p for p in decoder.parameters(model(layers=8))}
    assert found["layers.attention.query"].std == 0.02
    assert found["layers.attention.output"].std == 0.02 / math.sqrt(2 * 8) == found["layers.mlp.down"].std
    assert found["layers.attention_norm.scale"].init == "ones"


def test_flops_of_a_token_are_six_a_multiplied_parameter_and_attention():
    # tiny: of 853,120 parameters 256 x 128 are looked up; 6 x 820,352 = 4,922,112.
    # attention at 64 tokens: 12 x 4 layers x 4 heads x 32 x 64 = 393,216; half of it when causal.
    assert decoder.flops_per_token(model(), 64) == 4_922_112 + 393_216
    assert decoder.flops_per_token(model(), 64, causal=True) == 4_922_112 + 196_608


def test_a_tied_head_costs_as_much_as_an_untied_one_and_lookups_cost_nothing():
    assert decoder.flops_per_token(model(tied_head=True), 64) == decoder.flops_per_token(model(), 64)
    learned = {"positions": "learned", "max_sequence": 512}
    assert decoder.flops_per_token(model(**learned), 64) == decoder.flops_per_token(model(), 64)


def test_flops_of_llama_3_8b_are_those_of_the_papers():
    # 6 x (8,030,261,248 - 128256 x 4096) + 12 x 32 x 4096 x 8192 = 6 x 7,504,924,672 + 12,884,901,888
    assert decoder.flops_per_token(model("llama3_8b"), 8192) == 6 * 7_504_924_672 + 12_884_901_888
