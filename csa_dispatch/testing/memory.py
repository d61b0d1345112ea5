"""How a case's tensors lie in memory, for the strides that callers really bring."""

from __future__ import annotations

from torch import Tensor

_ROWS = ("query", "local_kv", "sparse_kv", "grad_output")
_OFFSETS = ("cu_seqlens", "cu_seqlens_k")


def place(tensor: Tensor, memory: str, name: str) -> Tensor:
    """A tensor of the same shape whose memory is laid out as ``memory`` says.

    contiguous: as drawn. transposed: head and token dimensions swapped in memory (BSHD), tables
    column-major. padded: rows are a slice of wider rows, off the 16-byte grid. expanded: KV
    shared by all batch entries and the upstream gradient by all heads, at stride 0 (values
    repeat accordingly). strided: every second element of the last dimension.

    Offsets stay contiguous; the sink has no token dimension and only ``strided`` moves it.
    """
    if memory == "contiguous" or name in _OFFSETS or tensor.numel() == 0:
        return tensor.contiguous()
    if memory == "strided":
        return _apart(tensor)
    if name == "attention_sink":
        return tensor.contiguous()
    if memory == "transposed":
        return (
            tensor.transpose(-3 if name in _ROWS else -1, -2)
            .contiguous()
            .transpose(-3 if name in _ROWS else -1, -2)
        )
    if memory == "padded":
        return _inside_wider(tensor)
    return _expanded(tensor, name)


def _apart(tensor: Tensor) -> Tensor:
    wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
    wide[..., ::2] = tensor
    return wide[..., ::2]


def _inside_wider(tensor: Tensor) -> Tensor:
    width = tensor.shape[-1]
    wide = tensor.new_zeros(*tensor.shape[:-1], width + 5)
    wide[..., 3 : 3 + width] = tensor
    return wide[..., 3 : 3 + width]


def _expanded(tensor: Tensor, name: str) -> Tensor:
    if name in ("local_kv", "sparse_kv"):
        return tensor[:1].expand(tensor.shape)
    if name == "grad_output":
        return tensor[:, :1].expand(tensor.shape)
    return tensor.contiguous()
