"""Checks of a config's values; a layer's arguments are held to some of them too."""

from __future__ import annotations

import sys

import torch

from ..validation import MAX_SCALE, fail
from ..wording import told

_REMEDY = "Take it from the model's config.json."


def check_int(
    name: str, value: object, least: int, most: int = sys.maxsize, remedy: str = _REMEDY
) -> None:
    """Raise unless ``value`` is an int, and no bool, from ``least`` to ``most``."""
    bounded = f"of {least} or more"
    if most < sys.maxsize or (isinstance(value, int) and value > most):
        bounded = f"from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, int):
        fail(name, told(value), f"an int {bounded}", remedy, TypeError)
    if not least <= value <= most:
        fail(name, value, f"an int {bounded}", remedy)


def check_positive(name: str, value: object) -> None:
    """Raise unless ``value`` is a number above 0 that fp32 holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        fail(name, told(value), "a number above 0", _REMEDY, TypeError)
    if not 0 < value <= MAX_SCALE:
        fail(name, value, "above 0 and finite in float32", _REMEDY)


def check_device(device: object) -> torch.device | None:
    """``device`` as torch has it; raise unless it is None, a torch.device or the name of one."""
    if device is None or isinstance(device, torch.device):
        return device
    required, remedy = "a torch.device, its name or None", "Pass 'cpu' or 'cuda', say."
    if not isinstance(device, str):
        fail("device", told(device), required, remedy, TypeError)
    try:
        return torch.device(device)
    except RuntimeError:
        fail("device", told(device), required, remedy)
