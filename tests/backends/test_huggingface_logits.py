"""Both backends compute what Hugging Face `transformers` computes from the same weights: logits to 1e-4 in float32."""

import importlib

import numpy as np
import pytest
import torch
from experiments import experiment
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from scaling_lab.models.huggingface import from_huggingface, huggingface_config

LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_sequence": 32}

#: What differs from the preset, and the sequence.
LLAMAS = {
    "the preset": ({}, 64),
    "one key-value head, an odd sequence": ({"kv_heads": 1}, 37),
    "every head its own keys, 3 layers": ({"kv_heads": 4, "layers": 3}, 16),
    "head_dim that is not embed / heads": ({"embed": 96, "heads": 6, "kv_heads": 3, "head_dim": 20}, 24),
    "a tied head, odd vocabulary": ({"tied_head": True, "vocab": 257}, 24),
    "frequency scaling of Llama 3.1, its theta": ({"rope_theta": 500000.0, "rope_scaling": LLAMA_3, "head_dim": 64}, 96),
    "biases, another epsilon": ({"bias": True, "norm_eps": 1e-3}, 24),
    "one token": ({}, 1),
}
GPT2S = {
    "the preset, a full context": ({}, 64),
    "odd sizes": ({"layers": 3, "mlp": 100, "vocab": 257}, 37),
    "a head of its own, another epsilon": ({"tied_head": False, "norm_eps": 1e-3}, 16),
    "one layer, one head": ({"layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 128}, 24),
}


def randomised(theirs: torch.nn.Module) -> torch.nn.Module:
    """Every tensor drawn anew, norms and biases too: what stays at 0 or 1 would not show a mistake."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            centre = 1.0 if "norm" in name or "ln_" in name else 0.0
            parameter.normal_(0.0, 0.1, generator=generator).add_(centre if name.endswith("weight") else 0.0)
    return theirs.eval()


def compare(backend: str, preset: str, changes: dict, sequence: int, config_class: type, model_class: type) -> None:
    keys = {f"model.{key}": value for key, value in changes.items()}
    asked = experiment(model=preset, sharding="single", backend=backend, **keys, **{"workload.sequence": sequence})
    theirs = randomised(model_class(config_class(**huggingface_config(asked.model), attn_implementation="eager")))
    weights = from_huggingface(asked.model, {name: tensor.numpy() for name, tensor in theirs.state_dict().items()})
    tokens = np.random.default_rng(0).integers(0, asked.model.vocab, (3, sequence), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    transformer = importlib.import_module(f"scaling_lab.backends.{backend}.transformer")
    got = transformer.logits(asked, weights, tokens)
    assert got.dtype == np.float32
    assert got.shape == (3, sequence, asked.model.vocab)
    assert np.abs(expected).max() > 1, "logits this small would hide a mistake"
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("case", LLAMAS)
def test_logits_equal_llama_for_causal_lm(backend, case):
    compare(backend, "tiny", *LLAMAS[case], LlamaConfig, LlamaForCausalLM)


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("case", GPT2S)
def test_logits_equal_gpt2_lm_head_model(backend, case):
    compare(backend, "tiny_gpt2", *GPT2S[case], GPT2Config, GPT2LMHeadModel)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_plain_and_fused_attention_agree_with_hugging_face_alike(backend):
    asked = experiment(sharding="single", backend=backend, **{"backend.attention": "plain", "workload.sequence": 24})
    theirs = randomised(LlamaForCausalLM(LlamaConfig(**huggingface_config(asked.model))))
    weights = from_huggingface(asked.model, {name: tensor.numpy() for name, tensor in theirs.state_dict().items()})
    tokens = np.random.default_rng(0).integers(0, asked.model.vocab, (2, 24), dtype=np.int32)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    got = importlib.import_module(f"scaling_lab.backends.{backend}.transformer").logits(asked, weights, tokens)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
