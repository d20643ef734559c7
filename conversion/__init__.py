"""Conversion between Falcon checkpoints and the checkpoints of related models."""

from .folders import TARGETS, Checkpoint, convert, make_plan, open_checkpoint
from .plan import Account, ConversionError, Piece, Plan

__all__ = [
    "TARGETS",
    "Account",
    "Checkpoint",
    "ConversionError",
    "Piece",
    "Plan",
    "convert",
    "make_plan",
    "open_checkpoint",
]
