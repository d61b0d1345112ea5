"""What the installed attn-gym, Triton and FlashAttention-4 offer, found out without a GPU."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple


class Features(NamedTuple):
    """Of the installed ``gather_attn``.

    Attributes:
        version: attn-gym's.
        fused: it has scale, impl and kernel_options (0.0.13 on).
        packed_offsets: it takes cu_seqlens (0.0.14 on); before that doc_ids for the window alone,
            slots numbered through the whole pool, and no more slots than the pool has rows.
        keeps_probabilities: its CuTe side can keep the probabilities instead of recomputing them
            in the backward.
    """

    version: str
    fused: bool
    packed_offsets: bool
    keeps_probabilities: bool


@lru_cache(maxsize=1)
def features() -> Features:
    """Import attn-gym, which loads none of its kernels' compilers, and look.

    Raises:
        ImportError: it is not installed, or is broken.
    """
    package = importlib.import_module("attn_gym.sparse.gather_attn")
    cute = importlib.import_module("attn_gym.sparse.gather_attn.impl.cute")
    names = set(inspect.signature(package.gather_attn).parameters)
    return Features(
        metadata.version("attn-gym"),
        {"scale", "impl", "kernel_options", "return_aux"} <= names,
        {"cu_seqlens", "cu_seqlens_k"} <= names,
        "bwd_recompute_p" in inspect.signature(cute.gather_attn).parameters,
    )


def known_features() -> Features:
    """``features``, or those of a current version where none can be imported."""
    try:
        return features()
    except Exception:
        return Features("", True, True, True)


@lru_cache(maxsize=1)
def triton_cat_takes_dim() -> bool:
    """Whether ``tl.cat`` takes a dimension, by the text of the module: importing it is slow."""
    text = _source("triton", "language", "core.py")
    found = re.search(r"^def cat\(([^)]*)\)", text, re.MULTILINE)
    return found is not None and re.search(r"\bdim\b", found.group(1)) is not None


@lru_cache(maxsize=1)
def has_cute() -> bool:
    """Whether FlashAttention-4, which the CuTe side calls, is installed."""
    return bool(_source("flash_attn", "cute", "interface.py"))


def triton_version() -> str:
    """The installed Triton's version, or that there is none."""
    try:
        return f"triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError:
        return "no triton"


def _source(package: str, *parts: str) -> str:
    """The text of a module of an installed package, empty when there is none."""
    spec = util.find_spec(package)
    folders = () if spec is None else spec.submodule_search_locations or ()
    paths = (Path(folder, *parts) for folder in folders)
    path = next((path for path in paths if path.is_file()), None)
    return "" if path is None else path.read_text(encoding="utf-8")
