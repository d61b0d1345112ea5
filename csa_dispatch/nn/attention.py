"""The V4 attention layer: window, compressed-sparse or compressed-dense by its ratio."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..api import attention
from ..call import Call
from ..functional.compressor_checks import check_dense, check_offsets
from ..transforms import any_autocast
from ..validation import DTYPES, check_flag, fail
from ..wording import a_kind, told
from .cache import LayerCache
from .checks import check_device, check_int
from .compressor import Compressor
from .config import CSAConfig
from .indexer import Indexer
from .norm import RMSNorm, rms_norm
from .record import IndexerRecord, LayerRecord
from .rope import rope_frequencies, rotate
from .rows import Tokens, rows_of, token_positions


class GroupedLinear(nn.Linear):
    """A linear map of each group of heads by itself: ``[N, groups, in] -> [N, groups, out]``."""

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, groups * out_features, False, device, dtype)
        self.groups = groups

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.unflatten(0, (self.groups, -1))
        return torch.einsum("ngi,goi->ngo", input, weight)


class CompressedSparseAttention(nn.Module):
    """DeepSeek-V4's attention layer around one ``attention()`` call.

    ``config.compress_ratio`` decides its kind: up to 1 a window alone; above, a compressor; in
    ``config.indexer_ratios`` an indexer too, unless ``config.dense``. Parameters have the names
    that Hugging Face transformers gives them, so its state dict of a layer loads as it is.

    Tensor parallelism shards heads: with ``tp_size`` ranks a module holds its share of
    ``q_b_proj``, ``sinks``, ``o_a_proj`` and ``o_b_proj`` and returns its part of the output,
    which the ranks then sum (all-reduce); the rest is whole on every rank. ``load_layer`` cuts
    the shares.

    Args:
        config: the layer's sizes.
        tp_size: ranks that share the layer's heads.
        device, dtype: of the linear maps; norms, sinks and position biases are fp32.

    Raises:
        TypeError: an argument is of another type, or dtype is none that attention takes.
        ValueError: tp_size does not divide ``config.o_groups``; torch knows no such device.
    """

    def __init__(
        self,
        config: CSAConfig,
        *,
        tp_size: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, CSAConfig):
            remedy = "Make one, or take one of from_deepseek_v4."
            fail("config", a_kind(config), "a CSAConfig", remedy, TypeError)
        check_int("tp_size", tp_size, 1, remedy="Pass the number of ranks.")
        if config.o_groups % tp_size:
            required = f"a divisor of o_groups, {config.o_groups}"
            fail("tp_size", tp_size, required, "A rank projects whole groups of heads.")
        device = check_device(device)
        if dtype is not None and dtype not in DTYPES:
            required = "float64, float32, bfloat16 or float16"
            fail("dtype", told(dtype), required, "Or pass None for torch's default.", TypeError)
        self.config, self.tp_size = config, tp_size
        heads, groups = config.num_attention_heads // tp_size, config.o_groups // tp_size
        d_model, head_dim, rank = config.hidden_size, config.head_dim, config.q_lora_rank
        made = {"device": device, "dtype": dtype}
        self.q_a_proj = nn.Linear(d_model, rank, bias=False, **made)
        self.q_a_norm = RMSNorm(rank, config.rms_norm_eps, device)
        self.q_b_proj = nn.Linear(rank, heads * head_dim, bias=False, **made)
        self.kv_proj = nn.Linear(d_model, head_dim, bias=False, **made)
        self.kv_norm = RMSNorm(head_dim, config.rms_norm_eps, device)
        self.o_a_proj = GroupedLinear(
            groups, heads * head_dim // groups, config.o_lora_rank, **made
        )
        self.o_b_proj = nn.Linear(groups * config.o_lora_rank, d_model, bias=False, **made)
        self.sinks = nn.Parameter(torch.zeros(heads, device=device, dtype=torch.float32))
        self.compressor: Compressor | None = None
        if config.has_compressor:
            self.compressor = Compressor(config, head_dim, **made)
        if self.compressor is not None and config.has_indexer:
            self.compressor.indexer = Indexer(config, **made)

    @property
    def indexer(self) -> Indexer | None:
        return getattr(self.compressor, "indexer", None)

    @overload
    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor | None = ...,
        layout: str = ...,
        cache: LayerCache | None = ...,
        dense: bool = ...,
        return_record: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor | None = ...,
        layout: str = ...,
        cache: LayerCache | None = ...,
        dense: bool = ...,
        return_record: Literal[True],
    ) -> tuple[Tensor, LayerRecord]: ...

    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        layout: str = "BSHD",
        cache: LayerCache | None = None,
        dense: bool = False,
        return_record: bool = False,
    ) -> Tensor | tuple[Tensor, LayerRecord]:
        """Attention over whole sequences, or over the next tokens after a cache.

        Args:
            hidden_states: ``[B, T, hidden_size]``, or ``[T, B, hidden_size]`` in layout SBHD.
            cu_seqlens: int32 ``[N + 1]`` offsets of packed documents; B is 1.
            layout: "BSHD" or "SBHD".
            cache: ``LayerCache`` of the tokens before these, brought up to date. It keeps no
                graph.
            dense: attend to every complete entry where an indexer would pick, as while it warms
                up: the record's ``indexer_loss`` then compares over them all. No entry is
                picked; layers without an indexer are as ever.
            return_record: also return what the call did: its ``LayerRecord``, whose
                ``indexer_loss`` trains the indexer.

        Returns:
            A tensor like ``hidden_states``: with tp_size above 1 this rank's part of it.

        Raises:
            TypeError, ValueError: a bad argument, or a cache with cu_seqlens, with gradients or
                with return_record; the message names it, what it is and must be.
        """
        hidden, rows = rows_of(hidden_states, layout)
        config = self.config
        _check_hidden(hidden, config, self.q_a_proj.weight)
        check_flag("dense", dense)
        check_flag("return_record", return_record)
        if cu_seqlens is not None:
            check_dense("cu_seqlens", cu_seqlens, hidden, "hidden_states")
            check_offsets(cu_seqlens, rows.batch)
        if cache is not None:
            _check_cached_call(cache, cu_seqlens, return_record)
        positions = token_positions(rows.tokens, cu_seqlens, hidden.device)
        if cache is not None:
            positions = positions + cache.past
        residual = self.q_a_norm(self.q_a_proj(hidden))
        frequencies = rope_frequencies(config, hidden.device)
        tokens = Tokens(hidden, residual, rows, positions, frequencies)

        query = rows.split(self.q_b_proj(residual)).unflatten(-1, (-1, config.head_dim))
        query = rotate(rms_norm(query, config.rms_norm_eps), positions, frequencies)
        query = query.transpose(1, 2)
        local_kv = rows.split(self.kv_norm(self.kv_proj(hidden)))
        local_kv = rotate(local_kv, positions, frequencies)[:, None]
        if cache is not None:
            record, attended = None, self._after(cache, query, local_kv, tokens, dense)
        else:
            record = self._whole(query, local_kv, tokens, cu_seqlens, return_record, dense)
            attended = record.output
        # Values carry their rotation; turning back by the query's position makes it relative.
        output = rotate(attended.transpose(1, 2), positions, frequencies, back=True)
        grouped = rows.join(output).flatten(1).unflatten(1, (self.o_a_proj.groups, -1))
        output = self.o_b_proj(self.o_a_proj(grouped).flatten(1)).view(hidden_states.shape)
        return output if record is None or not return_record else (output, record)

    def _whole(
        self,
        query: Tensor,
        local_kv: Tensor,
        tokens: Tokens,
        cu_seqlens: Tensor | None,
        learn: bool,
        dense: bool,
    ) -> LayerRecord:
        """``attention()`` over whole sequences; ``learn`` keeps the indexer's graph."""
        config = self.config
        entries = picks = cu_seqlens_k = indexed = None
        if self.compressor is not None:
            entries, cu_seqlens_k = self.compressor(tokens, cu_seqlens)
            entries = entries[:, None]
        # Without picks nothing of the indexer reaches the output.
        if self.indexer is not None and (learn or not dense):
            with torch.set_grad_enabled(learn and torch.is_grad_enabled()):
                queries = self.indexer.queries(tokens.detached())
                keys, _ = self.indexer(tokens.detached(), cu_seqlens)
            if not dense:
                picks = self.indexer.pick(
                    queries, keys, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k
                )
            indexed = IndexerRecord(queries, keys, config.compress_ratio, self.indexer.scale)
        every = entries is not None and picks is None
        call = Call(
            query=query,
            local_kv=local_kv,
            sparse_kv=entries,
            kv_indices=picks,
            attention_sink=self.sinks,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            doc_ids=None,
            sliding_window_size=config.sliding_window,
            compress_ratio=config.compress_ratio if every else None,
            scale=config.head_dim**-0.5,
        )
        output, lse = attention(**call._asdict(), return_lse=True)
        return LayerRecord(call, output, lse, indexed)

    def _after(
        self,
        cache: LayerCache,
        query: Tensor,
        local_kv: Tensor,
        tokens: Tokens,
        dense: bool,
    ) -> Tensor:
        """Attention of the next tokens, ``[B, H, T, D]``; the cache is brought up to date."""
        cache.check(self.config, local_kv)
        picks = None
        past = cache.past
        if self.compressor is not None:
            entries, cache.state = self.compressor.step(tokens, cache.state, past)
            cache.entries.append(entries)
        if self.indexer is not None:
            keys, cache.index_state = self.indexer.step(tokens, cache.index_state, past)
            cache.index_keys.append(keys)
            if not dense:
                queries = self.indexer.queries(tokens)
                picks = self.indexer.pick(queries, cache.index_keys.rows, past=past)
        return cache.attend(query, local_kv, picks, self.sinks)


def _check_hidden(hidden: Tensor, config: CSAConfig, weight: Tensor) -> None:
    """Raise unless the layer's weights can take ``hidden``, ``[N, C]``."""
    tokens, channels = hidden.shape
    if channels != config.hidden_size:
        required = f"of hidden_size, {config.hidden_size}"
        fail("hidden_states", f"of {channels} channels", required, "Check layout, or the config.")
    if not tokens:
        fail("hidden_states", "of no tokens", "of one or more", "Leave the call out.")
    if hidden.device != weight.device:
        required = f"on {weight.device}, as the layer's weights are"
        # Meta tensors have no values to move.
        remedy = "Make it there." if hidden.is_meta else "Move one of them."
        fail("hidden_states", f"on {hidden.device}", required, remedy)
    if hidden.dtype != weight.dtype and not any_autocast():
        required = f"of {weight.dtype}, as the layer's weights are"
        fail("hidden_states", f"of {hidden.dtype}", required, "Cast it, or use torch.autocast.")


def _check_cached_call(cache: object, cu_seqlens: Tensor | None, return_record: bool) -> None:
    if not isinstance(cache, LayerCache):
        fail("cache", a_kind(cache), "a LayerCache or None", "See LayerCache.", TypeError)
    if cu_seqlens is not None:
        remedy = "Pass each document as a row of the batch."
        fail("cu_seqlens", "given with a cache", "None: one document a row", remedy)
    if return_record:
        remedy = "Leave the cache out to train."
        fail("return_record", "True with a cache", "False: it keeps no graph", remedy)
    if torch.is_grad_enabled():
        raise ValueError(
            "gradients are enabled with a cache, which keeps none. Use torch.no_grad()."
        )
