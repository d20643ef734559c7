"""Falcon fast-weight attention: six update rules, as a recurrence and in chunks."""

from . import layers
from .api import FalconOutput, falcon_attention, falcon_step
from .convolution import short_convolution
from .norm import gated_norm
from .rule import RULES, Rule
from .state import FalconState

__all__ = [
    "RULES",
    "FalconOutput",
    "FalconState",
    "Rule",
    "falcon_attention",
    "falcon_step",
    "gated_norm",
    "layers",
    "short_convolution",
]
