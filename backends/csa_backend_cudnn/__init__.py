"""cuDNN's DeepSeek sparse attention kernels (nvidia-cudnn-frontend)."""

from __future__ import annotations

from .backend import CudnnBackend

backend = CudnnBackend()

__all__ = ["CudnnBackend", "backend"]
