"""Quickstart: one CSA call on the CPU, forward and backward, and who ran it."""

import torch

from csa_dispatch import attention, explain

batch, heads, tokens, head_dim, ratio = 1, 4, 32, 16, 4
entries = tokens // ratio


def wave(*shape: int) -> torch.Tensor:
    """Smooth numbers between -1 and 1."""
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(count) * 0.7).reshape(shape).requires_grad_()


query = wave(batch, heads, tokens, head_dim)
local_kv = wave(batch, 1, tokens, head_dim)  # one KV head; key and value are the same tensor
sparse_kv = wave(batch, 1, entries, head_dim)  # a compressed entry for every four tokens
attention_sink = torch.zeros(heads, requires_grad=True)

# Each token selects its two latest complete entries; -1 where there are fewer.
complete = (torch.arange(tokens) + 1) // ratio
latest = torch.stack((complete - 1, complete - 2), dim=-1)
kv_indices = latest.clamp(min=-1).to(torch.int32)[None]

output, lse = attention(
    query, local_kv, sparse_kv, kv_indices, attention_sink, sliding_window_size=8, return_lse=True
)
output.square().sum().backward()

print("output", tuple(output.shape), "lse", tuple(lse.shape))
leaves = {"query": query, "local_kv": local_kv, "sparse_kv": sparse_kv, "sink": attention_sink}
for name, leaf in leaves.items():
    assert leaf.grad is not None
    print(f"gradient of {name}: norm {leaf.grad.norm():.3f}")
print(explain(query, local_kv, sparse_kv, kv_indices, attention_sink, sliding_window_size=8))
