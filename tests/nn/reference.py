"""The V4 layer in float64 loops, a token at a time: slow, obvious, sharing no code with ours."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from csa_dispatch.nn import CompressedSparseAttention, CSAConfig


def frequencies(config: CSAConfig) -> list[float]:
    """Angle per position of each pair of channels."""
    size = config.qk_rope_head_dim
    compressed = config.compress_ratio > 1
    theta = config.compress_rope_theta if compressed else config.rope_theta
    found = []
    for pair in range(size // 2):
        angle = theta ** (-2 * pair / size)
        if compressed and config.yarn is not None:
            yarn = config.yarn

            def pair_at(rotations: float, yarn=yarn, theta=theta) -> float:
                length = yarn.original_max_position_embeddings / rotations / (2 * math.pi)
                return size * math.log(length) / math.log(theta) / 2

            low = max(math.floor(pair_at(yarn.beta_fast)), 0)
            high = min(math.ceil(pair_at(yarn.beta_slow)), size - 1)
            slow = min(max((pair - low) / (high - low), 0.0), 1.0)
            angle = angle / yarn.factor * slow + angle * (1 - slow)
        found.append(angle)
    return found


def rotated(x: Tensor, position: int, angles: list[float], sign: int = 1) -> Tensor:
    """One vector ``[..., D]`` at one position; pairs (2i, 2i + 1) of the last channels turn."""
    x = x.clone()
    first = x.shape[-1] - 2 * len(angles)
    for pair, angle in enumerate(angles):
        even, odd = first + 2 * pair, first + 2 * pair + 1
        cos, sin = math.cos(sign * position * angle), math.sin(sign * position * angle)
        a, b = x[..., even].clone(), x[..., odd].clone()
        x[..., even], x[..., odd] = a * cos - b * sin, a * sin + b * cos
    return x


def normed(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * weight


def entries_of(
    x: Tensor, weights: dict[str, Tensor], prefix: str, config: CSAConfig, dim: int
) -> list[Tensor]:
    """The entries of one document ``[T, d]``, normalised and rotated."""
    ratio, overlapping = config.compress_ratio, config.compress_ratio in config.indexer_ratios
    values = x @ weights[prefix + "kv_proj.weight"].T
    gates = x @ weights[prefix + "gate_proj.weight"].T
    bias = weights[prefix + "position_bias"]
    angles, found = frequencies(config), []
    for block in range(x.shape[0] // ratio):
        own = slice(-dim, None)
        slots = [(block * ratio + j, j, own) for j in range(ratio)]
        if overlapping and block:
            slots += [((block - 1) * ratio + j, j, slice(dim)) for j in range(ratio)]
        logits = torch.stack([gates[token, part] + bias[j, part] for token, j, part in slots])
        content = torch.stack([values[token, part] for token, _, part in slots])
        entry = (logits.softmax(0) * content).sum(0)
        entry = normed(entry, config.rms_norm_eps, weights[prefix + "kv_norm.weight"])
        found.append(rotated(entry, block * ratio, angles))
    return found


def picks_of(
    x: Tensor, residual: Tensor, weights: dict[str, Tensor], config: CSAConfig
) -> list[list[int]]:
    """The entries each token of one document selects."""
    prefix, dim = "compressor.indexer.", config.index_head_dim
    keys, angles = entries_of(x, weights, prefix, config, dim), frequencies(config)
    picks = []
    for t in range(x.shape[0]):
        query = (weights[prefix + "q_b_proj.weight"] @ residual[t]).view(-1, dim)
        query = rotated(query, t, angles)
        head = weights[prefix + "scorer.weights_proj.weight"] @ x[t]
        visible = range((t + 1) // config.compress_ratio)
        scores = [float((head * (query @ keys[i]).relu()).sum()) for i in visible]
        best = sorted(visible, key=lambda i: -scores[i])
        picks.append(best[: config.index_topk])
    return picks


def reference_layer(layer: CompressedSparseAttention, document: Tensor) -> Tensor:
    """Output ``[T, d]`` of one document ``[T, d]``, in float64."""
    config = layer.config
    weights = {name: value.detach().double() for name, value in layer.state_dict().items()}
    x, eps = document.double(), config.rms_norm_eps
    angles, dim = frequencies(config), config.head_dim
    residual = normed(x @ weights["q_a_proj.weight"].T, eps, weights["q_a_norm.weight"])
    kv = normed(x @ weights["kv_proj.weight"].T, eps, weights["kv_norm.weight"])
    kv = [rotated(row, t, angles) for t, row in enumerate(kv)]
    entries, picks = [], [[]] * x.shape[0]
    if config.compress_ratio > 1:
        entries = entries_of(x, weights, "compressor.", config, dim)
        picks = [list(range((t + 1) // config.compress_ratio)) for t in range(x.shape[0])]
    if config.compress_ratio in config.indexer_ratios and not config.dense:
        picks = picks_of(x, residual, weights, config)
    rows = []
    for t in range(x.shape[0]):
        query = normed((weights["q_b_proj.weight"] @ residual[t]).view(-1, dim), eps)
        query = rotated(query, t, angles)
        keys = kv[max(0, t - config.sliding_window + 1) : t + 1] + [entries[i] for i in picks[t]]
        keys = torch.stack(keys)
        logits = query @ keys.T * dim**-0.5
        logits = torch.cat((logits, weights["sinks"][:, None]), dim=1)
        output = rotated(logits.softmax(1)[:, :-1] @ keys, t, angles, sign=-1)
        groups = output.reshape(config.o_groups, -1)
        low = weights["o_a_proj.weight"].view(config.o_groups, -1, groups.shape[1])
        low = torch.stack([low[g] @ groups[g] for g in range(config.o_groups)])
        rows.append(weights["o_b_proj.weight"] @ low.flatten())
    return torch.stack(rows)
