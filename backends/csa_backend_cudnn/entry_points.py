"""The functions of nvidia-cudnn-frontend that the adapter calls, and what they must accept."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from csa_dispatch import Availability, Reason

DISTRIBUTION = "nvidia-cudnn-frontend"
REMEDY = "pip install 'csa-dispatch[cudnn]'"
PACKAGE = "cudnn.deepseek_sparse_attention"
FORWARD, BACKWARD = "sparse_attention_forward_wrapper", "sparse_attention_backward_wrapper"
SCORES, TOP_K = "indexer_forward_wrapper", "indexer_top_k_wrapper"

FILES = {
    FORWARD: Path("deepseek_sparse_attention", "sparse_attention_forward", "api.py"),
    BACKWARD: Path("deepseek_sparse_attention", "sparse_attention_backward", "api.py"),
    SCORES: Path("deepseek_sparse_attention", "indexer_forward", "api.py"),
    TOP_K: Path("deepseek_sparse_attention", "indexer_top_k", "api.py"),
}
"""Where each function is defined, below the package ``cudnn``."""

REQUIRED: dict[str, frozenset[str]] = {
    FORWARD: frozenset({"q", "kv", "topk_idxs", "attn_sink", "softmax_scale"}),
    # q_cluster_mode came with 1.32, the first version whose kernels skip unused slots anywhere
    # in a row and take the sink apart from lse.
    BACKWARD: frozenset(
        {
            *("q", "kv", "out", "dout", "lse", "attn_sink", "topk_idxs", "softmax_scale"),
            *("topk_length", "deterministic", "q_cluster_mode"),
        }
    ),
    SCORES: frozenset(
        {
            *("q", "k", "w", "ratio", "cu_seqlens_q", "cu_seqlens_k"),
            *("max_seqlen_q", "max_seqlen_k", "q_causal_offsets"),
        }
    ),
    TOP_K: frozenset({"input_values", "seq_lens", "top_k", "return_val", "deterministic"}),
}
"""Parameters whose presence makes a version new enough."""

DEPENDENCIES = {
    "cutlass": "nvidia-cutlass-dsl",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda.bindings": "cuda-bindings",
}
"""What its kernels are compiled with, by distribution."""


class EntryPoints(NamedTuple):
    """cuDNN's sparse forward (SM100) and backward (SM90, SM100), on tokens of all batch entries.

    forward(q ``[T, H, D]``, kv ``[N, D]``, topk_idxs int32 ``[T, K]``, attn_sink fp32 ``[H]`` or
    None, softmax_scale) -> out ``[T, H, D]`` normalised with the sink, lse fp32 ``[T, H]`` without
    it, natural log; a row without keys has output 0 and lse +inf.

    backward(q, kv, out, dout, lse without the sink, attn_sink fp32 ``[H]``, topk_idxs,
    softmax_scale, topk_length int32 ``[T]`` or None, deterministic) -> dq and dkv in the inputs'
    dtype, d_sink fp32. A slot is used iff ``0 <= i < N``; slots at topk_length and beyond are not.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class IndexerEntryPoints(NamedTuple):
    """cuDNN's indexer scores and top-k (SM90, SM100), on packed documents.

    scores(q bf16 ``[T, H, D]``, k bf16 ``[S, 1, D]``, w ``[T, H]``, ratio, cu_seqlens_q and
    cu_seqlens_k int32 ``[N + 1]``, max_seqlen_q, max_seqlen_k, q_causal_offsets int32 ``[N]``) ->
    scores fp32 ``[T, max_seqlen_k]``, ``sum_h w relu(q . k)``; columns count from a document's
    first entry, and what a token does not see is -inf.

    top_k(input_values ``[T, N]``, seq_lens int32 ``[T]``, top_k, return_val, deterministic) ->
    indices int32 ``[T, top_k]`` of the largest among the first seq_lens columns; deterministic:
    ascending and the lowest of equals; then -1.
    """

    scores: Callable[..., Any]
    top_k: Callable[..., Any]


def entry_points() -> EntryPoints:
    """Import cuDNN's frontend (seconds, the first time) and return its two functions."""
    package = importlib.import_module(PACKAGE)
    return EntryPoints(getattr(package, FORWARD), getattr(package, BACKWARD))


def indexer_entry_points() -> IndexerEntryPoints:
    """As ``entry_points``, the two functions of the indexer."""
    package = importlib.import_module(PACKAGE)
    return IndexerEntryPoints(getattr(package, SCORES), getattr(package, TOP_K))


def availability() -> Availability:
    """Whether a frontend that is new enough is here, without importing it."""
    root = package_root()
    if root is None:
        reason = Reason("availability", f"{DISTRIBUTION} not installed", DISTRIBUTION, REMEDY)
        return Availability("", reason)
    try:
        version = f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    except metadata.PackageNotFoundError:
        version = f"{DISTRIBUTION} of unknown version"
    try:
        missing = missing_parameters(root)
    except (OSError, SyntaxError, ValueError) as error:
        actual = f"broken ({type(error).__name__}: {error})"
        return Availability(version, Reason("availability", actual, "readable source", REMEDY))
    if missing:
        actual = f"{version}, without {', '.join(missing)}"
        return Availability(version, Reason("availability", actual, "1.32 or newer", REMEDY))
    absent = [name for module, name in DEPENDENCIES.items() if not _findable(module)]
    if absent:
        actual = f"{', '.join(absent)} not installed"
        reason = Reason("availability", actual, f"what {DISTRIBUTION} imports", REMEDY)
        return Availability(version, reason)
    return Availability(version)


def package_root() -> Path | None:
    """The folder of the package ``cudnn``, found without importing it."""
    spec = importlib.util.find_spec("cudnn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    return next(map(Path, folders), None)


def missing_parameters(root: Path) -> list[str]:
    """Entry points, or parameters of theirs, that the sources below ``root`` do not define.

    Raises:
        OSError: a source is there but cannot be read.
        SyntaxError: it is not Python.
    """
    missing: list[str] = []
    for name, parameters in REQUIRED.items():
        path = root / FILES[name]
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        found = next(
            (
                {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
                for node in ast.parse(text).body
                if isinstance(node, ast.FunctionDef) and node.name == name
            ),
            None,
        )
        if found is None:
            missing.append(f"{name}()")
        else:
            missing += [f"{name}({item}=)" for item in sorted(parameters - found)]
    return missing


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
