"""Our weights under Hugging Face's names and back: exact, strict about every tensor, and what `transformers` really has."""

import importlib

import numpy as np
import pytest
from experiments import experiment

from scaling_lab.errors import ConfigError
from scaling_lab.models import decoder
from scaling_lab.models.huggingface import from_huggingface, huggingface_class, huggingface_config, to_huggingface

SMALL = {"model.embed": 12, "model.mlp": 20, "model.head_dim": 6, "model.vocab": 10, "model.layers": 2}
SMALL_MOE = {"model": "tiny_moe", **SMALL, "model.moe.expert_mlp": 7, "model.moe.experts": 5}

MODELS = {
    "llama": {"model": "tiny", **SMALL},
    "llama, tied": {"model": "tiny", "model.tied_head": True, "model.layers": 1},
    "llama, biases": {"model": "tiny", "model.bias": True, "model.layers": 3},
    "gpt2": {"model": "tiny_gpt2", "model.mlp": 20, "model.vocab": 10, "model.layers": 2},
    "gpt2, untied": {"model": "tiny_gpt2", "model.tied_head": False, "model.layers": 1},
    "qwen3": {"model": "tiny", **SMALL, "model.qk_norm": True},
    "mixtral": SMALL_MOE,
    "mixtral, tied": {**SMALL_MOE, "model.tied_head": True, "model.moe.routing": "topk_softmax"},
    "qwen3 moe": {**SMALL_MOE, "model.qk_norm": True, "model.moe.routing": "softmax_topk"},
    "qwen3 moe, dense layers": {**SMALL_MOE, "model.qk_norm": True, "model.layers": 3, "model.moe.dense_layers": 1},
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


def test_experts_lie_side_by_side_with_gate_before_up():
    weights = weights_of(model("mixtral"))  # 5 experts of 12 -> 7
    state = to_huggingface(model("mixtral"), weights)
    joined = state["model.layers.1.mlp.experts.gate_up_proj"]
    assert joined.shape == (5, 2 * 7, 12)
    assert np.array_equal(joined[3, :7], weights["layers.moe.gate"][1, 3].T)
    assert np.array_equal(joined[3, 7:], weights["layers.moe.up"][1, 3].T)
    assert np.array_equal(state["model.layers.1.mlp.experts.down_proj"][4], weights["layers.moe.down"][1, 4].T)
    assert np.array_equal(state["model.layers.0.mlp.gate.weight"], weights["layers.moe.router"][0].T)


def test_dense_layers_are_the_first_ones_and_the_mixtures_follow():
    weights = weights_of(model("qwen3 moe, dense layers"))  # 1 dense layer, then 2 with experts
    state = to_huggingface(model("qwen3 moe, dense layers"), weights)
    assert np.array_equal(state["model.layers.0.mlp.up_proj.weight"], weights["dense_layers.mlp.up"][0].T)
    assert np.array_equal(state["model.layers.2.mlp.gate.weight"], weights["layers.moe.router"][1].T)
    assert np.array_equal(state["model.layers.2.self_attn.q_norm.weight"], weights["layers.attention.query_norm"][1])
    assert not [name for name in state if name.startswith("model.layers.3.")]


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
        ({"model": "tiny_gpt2", "bias": False}, "model.bias=false"),
        ({"model": "tiny_gpt2", "kv_heads": 2}, "model.kv_heads=2"),
        ({"model": "tiny_gpt2", "head_dim": 16}, "model.head_dim=16"),
        ({"model": "tiny_gpt2", "max_sequence": None}, "model.max_sequence"),
        ({"model": "tiny_gpt2", "qk_norm": True}, "model.qk_norm=true"),
        ({"model": "tiny_moe", "norm": "layer"}, "model.moe"),
        ({"qk_norm": True, "bias": True}, "Qwen3ForCausalLM does not go with model.bias=true. Set model.bias=false."),
        ({"model": "tiny_moe", "moe.shared_experts": 1}, "with model.moe.shared_experts=1. Set model.moe.shared_experts=0."),
        ({"model": "tiny_moe", "moe.capacity_factor": 1.25}, "Set model.moe.capacity_factor=null."),
        ({"model": "tiny_moe", "moe.routed_scale": 2.5}, "Set model.moe.routed_scale=1.0."),
        ({"model": "tiny_moe", "moe.dense_layers": 1}, "Set model.moe.dense_layers=0."),
        ({"model": "tiny_moe", "moe.routing": "softmax_topk"}, "Set model.moe.routing=softmax_topk_normalised."),
        (
            {"model": "tiny_moe", "bias": True, "moe.dense_layers": 1},
            "with model.bias=true, model.moe.dense_layers=1. Set model.bias=false model.moe.dense_layers=0.",
        ),
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


def test_latent_attention_is_refused():
    found = experiment(model="deepseek_v3").model
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM does not go with model\.latent, .*Set model\.latent=null "):
        huggingface_config(found)


def test_the_config_of_qwen3_30b_a3b_is_the_published_one():
    found = huggingface_config(experiment(model="qwen3_30b_a3b").model)
    published = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    published |= {"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
    published |= {"num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "vocab_size": 151936}
    published |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False}
    assert found | published == found


def test_the_config_of_mixtral_8x7b_is_the_published_one():
    found = huggingface_config(experiment(model="mixtral_8x7b").model)
    published = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    published |= {"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    published |= {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": False}
    assert found | published == found


def their_model(model):
    """The model of `transformers`, every tensor drawn at random: what stays at 0 or 1 would not show a mistake."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    model_class = getattr(transformers, huggingface_class(model))
    theirs = model_class(model_class.config_class(**huggingface_config(model))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return theirs


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_transformers_is_covered_and_comes_back_as_it_was(name):
    state = {key: tensor.numpy() for key, tensor in their_model(model(name)).state_dict().items()}
    weights = from_huggingface(model(name), state)
    assert {key: w.shape for key, w in weights.items()} == {p.name: p.shape for p in decoder.parameters(model(name))}
    back = to_huggingface(model(name), weights)
    assert back.keys() == state.keys()
    assert all(np.array_equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize(
    ("name", "routing"),
    [
        ("mixtral", "topk_softmax"),
        ("mixtral", "softmax_topk_normalised"),
        ("qwen3 moe", "topk_softmax"),
        ("qwen3 moe", "softmax_topk_normalised"),
        ("qwen3 moe", "softmax_topk"),
    ],
)
def test_the_mixture_of_transformers_is_the_one_that_our_equations_say(name, routing):
    torch = importlib.import_module("torch")
    asked = experiment(**{**MODELS[name], "model.moe.routing": routing}).model
    theirs = their_model(asked)
    theirs.set_experts_implementation("eager")  # the grouped product that 5.24 prefers has no float64
    state = {key: tensor.numpy().astype(np.float64) for key, tensor in theirs.state_dict().items()}
    x = np.random.default_rng(1).standard_normal((2, 9, asked.embed))
    with torch.no_grad():
        expected = theirs.double().model.layers[1].mlp(torch.from_numpy(x)).numpy()
    weights = {key: w[1] for key, w in from_huggingface(asked, state).items() if key.startswith("layers.moe.")}
    got = np.array([mixture(asked.moe, weights, token) for token in x.reshape(-1, asked.embed)])
    # their softmax is float32
    np.testing.assert_allclose(got.reshape(x.shape), expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def mixture(moe, weights, x):
    """What `models.moe` says of one token x (embed,), without capacity."""
    router, gate, up, down = (weights[f"layers.moe.{part}"] for part in ("router", "gate", "up", "down"))
    logits = x @ router
    chosen = np.argsort(-logits)[: moe.experts_per_token]
    share = np.exp(logits) / np.exp(logits).sum()
    if moe.routing == "softmax_topk_normalised":
        share = share / share[chosen].sum()
    if moe.routing == "topk_softmax":
        share = np.exp(logits) / np.exp(logits[chosen]).sum()
    gates = {e: x @ gate[e] for e in chosen}
    return sum(share[e] * ((gates[e] / (1 + np.exp(-gates[e])) * (x @ up[e])) @ down[e]) for e in chosen)
