"""Our weights under Hugging Face's names and back: exact, and strict about every tensor. No framework is needed."""

import numpy as np
import pytest
from experiments import experiment

from scaling_lab.errors import ConfigError
from scaling_lab.models import decoder
from scaling_lab.models.huggingface import from_huggingface, huggingface_config, to_huggingface

MODELS = {
    "llama": {"model": "tiny", "model.embed": 12, "model.mlp": 20, "model.head_dim": 6, "model.vocab": 10, "model.layers": 2},
    "llama, tied": {"model": "tiny", "model.tied_head": True, "model.layers": 1},
    "llama, biases": {"model": "tiny", "model.bias": True, "model.layers": 3},
    "gpt2": {"model": "tiny_gpt2", "model.mlp": 20, "model.vocab": 10, "model.layers": 2},
    "gpt2, untied": {"model": "tiny_gpt2", "model.tied_head": False, "model.layers": 1},
}


def model(name):
    return experiment(**MODELS[name]).model


def weights_of(model):
    random = np.random.default_rng(0)
    return {p.name: random.standard_normal(p.shape, dtype=np.float32) for p in decoder.parameters(model)}


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_exact(name):
    weights = weights_of(model(name))
    state = to_huggingface(model(name), weights)
    back = from_huggingface(model(name), state)
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[key], weights[key]) and back[key].dtype == np.float32 for key in weights)
    again = to_huggingface(model(name), back)
    assert again.keys() == state.keys()
    assert all(np.array_equal(again[key], state[key]) for key in state)


@pytest.mark.parametrize("name", MODELS)
def test_no_element_is_lost_or_doubled(name):
    weights = weights_of(model(name))
    state = to_huggingface(model(name), weights)
    if model(name).tied_head:
        assert np.array_equal(state.pop("lm_head.weight"), weights["embed.tokens"])
    ours, theirs = (np.sort(np.concatenate([w.ravel() for w in side.values()])) for side in (weights, state))
    assert np.array_equal(ours, theirs)


def test_llama_matrices_are_outputs_by_inputs_with_heads_in_order():
    weights = weights_of(model("llama"))  # embed 12, heads 4, kv_heads 2, head_dim 6
    state = to_huggingface(model("llama"), weights)
    assert state["model.layers.1.self_attn.q_proj.weight"].shape == (24, 12)
    assert state["model.layers.1.self_attn.k_proj.weight"].shape == (12, 12)
    assert state["model.layers.1.self_attn.o_proj.weight"].shape == (12, 24)
    # row 6 x 2 + 5 is head 2, place 5
    row = state["model.layers.1.self_attn.q_proj.weight"][17]
    assert np.array_equal(row, weights["layers.attention.query"][1, :, 2, 5])
    assert np.array_equal(state["lm_head.weight"], weights["head.weight"].T)


def test_gpt2_holds_queries_keys_and_values_side_by_side():
    weights = weights_of(model("gpt2"))
    state = to_huggingface(model("gpt2"), weights)
    fused = state["transformer.h.1.attn.c_attn.weight"]
    assert fused.shape == (128, 3 * 128)
    assert np.array_equal(fused[:, 128:256], weights["layers.attention.key"][1].reshape(128, 128))
    assert np.array_equal(state["transformer.h.0.attn.c_attn.bias"][256:], weights["layers.attention.value_bias"][0].ravel())
    assert np.array_equal(state["transformer.h.0.mlp.c_fc.weight"], weights["layers.mlp.up"][0])


def test_other_dtypes_are_kept():
    weights = {name: w.astype(np.float16) for name, w in weights_of(model("gpt2")).items()}
    state = to_huggingface(model("gpt2"), weights)
    assert {w.dtype for w in state.values()} == {np.dtype(np.float16)}
    assert {w.dtype for w in from_huggingface(model("gpt2"), state).values()} == {np.dtype(np.float16)}


def test_every_missing_left_over_and_misshapen_tensor_is_named():
    state = to_huggingface(model("llama"), weights_of(model("llama")))
    del state["model.norm.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].T
    with pytest.raises(ConfigError) as caught:
        from_huggingface(model("llama"), state)
    message = str(caught.value)
    assert "model.norm.weight: missing" in message
    assert "model.layers.0.self_attn.q_proj.bias: not a tensor of this model" in message
    assert "model.layers.1.mlp.up_proj.weight: shape (12, 20), expected (20, 12)" in message


def test_our_own_names_and_shapes_are_checked_too():
    weights = weights_of(model("llama"))
    weights["extra"] = weights.pop("final_norm.scale")
    weights["head.weight"] = weights["head.weight"].T
    with pytest.raises(
        ConfigError, match=r"(?s)final_norm\.scale: missing.*extra: not a tensor.*head\.weight: shape \(10, 12\)"
    ):
        to_huggingface(model("llama"), weights)


def test_a_tied_head_may_be_absent_but_not_different():
    state = to_huggingface(model("gpt2"), weights_of(model("gpt2")))
    absent = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    assert from_huggingface(model("gpt2"), absent).keys() == from_huggingface(model("gpt2"), state).keys()
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from the embedding, but model\.tied_head=true"):
        from_huggingface(model("gpt2"), {**state, "lm_head.weight": state["lm_head.weight"] + 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "layer"}, "model.norm"),
        ({"activation": "gelu"}, "model.positions=rope"),
        ({"model": "tiny_gpt2", "bias": False}, "model.bias=False"),
        ({"model": "tiny_gpt2", "kv_heads": 2}, "model.kv_heads=2"),
        ({"model": "tiny_gpt2", "head_dim": 16}, "model.head_dim=16"),
        ({"model": "tiny_gpt2", "max_sequence": None}, "model.max_sequence"),
    ],
)
def test_a_model_that_hugging_face_does_not_have_is_refused(changes, words):
    preset = changes.pop("model", "tiny")
    asked = experiment(model=preset, **{f"model.{key}": value for key, value in changes.items()}).model
    for refused in (huggingface_config, lambda m: to_huggingface(m, weights_of(m)), lambda m: from_huggingface(m, {})):
        with pytest.raises(ConfigError, match="has no counterpart in Hugging Face") as caught:
            refused(asked)
        assert words in str(caught.value)


def test_the_config_of_llama_3_is_the_published_one():
    found = huggingface_config(experiment(model="llama3_1b").model)
    assert found["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    published = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    published |= {"intermediate_size": 8192, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    assert found | published == found
    assert found["tie_word_embeddings"]
