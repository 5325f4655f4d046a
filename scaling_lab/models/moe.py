"""The mixture of experts that stands in for a layer's mlp: what it computes and its parameters. No framework, no mesh.

For each token x: y = routed_scale x (sum over its experts of weight x mlp(x)) + shared mlp(x). Each mlp is the dense one at
another width; none has biases. Router: logits = x . router, in float32; `Moe.routing` says how the top k get their weights.

Everything below is per sequence, so that no split of the batch changes it (T tokens, k experts a token, E experts):
- capacity: an expert takes the first ceil(capacity_factor x T x k / E) assignments in token order; for the rest of them
  the token goes without that expert, the weights of its others staying as they are. Lepikhin et al. 2020 (GShard).
- balance loss: E x sum over experts of (assignments / (k x T)) x (mean softmax probability), 1 when even; mean over
  sequences, sum over layers. DeepSeek-AI 2024 (arXiv 2412.19437), eq. 17-20, over softmax probabilities.
- z loss: mean over tokens of logsumexp(logits)^2, sum over layers. Zoph et al. 2022 (ST-MoE).
"""

from __future__ import annotations

from scaling_lab.models.model import Model, Moe
from scaling_lab.models.parameters import Dim, Parameter, matrix


def parameters(model: Model, moe: Moe) -> tuple[Parameter, ...]:
    """Those of one layer: the router, the routed experts side by side, and all shared experts as one mlp."""
    # The router's experts carry no axis: it is small, and every device of an expert axis needs the logits of all experts
    # to find its tokens' top k, so it is stored and computed whole there rather than split and its logits gathered.
    router = matrix("moe.router", model.init_std, Dim("embed", model.embed), Dim(None, moe.experts))
    routed = _mlp(model, "moe.", moe.expert_mlp, Dim("experts", moe.experts))
    shared = _mlp(model, "moe.shared_", moe.shared_experts * moe.expert_mlp) if moe.shared_experts else ()
    return (router, *routed, *shared)


def _mlp(model: Model, prefix: str, width: int, *side_by_side: Dim) -> tuple[Parameter, ...]:
    """An mlp, or several side by side in the dims before its own."""
    embed, mlp = Dim("embed", model.embed), Dim("mlp", width)
    gate = matrix(f"{prefix}gate", model.init_std, *side_by_side, embed, mlp)
    return (
        *((gate,) if model.activation == "swiglu" else ()),
        matrix(f"{prefix}up", model.init_std, *side_by_side, embed, mlp),
        matrix(f"{prefix}down", model.residual_std, *side_by_side, mlp, embed),
    )
