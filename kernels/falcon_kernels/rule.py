"""The six update rules as three facts each, and the options that all of them share."""

import math
from dataclasses import dataclass
from typing import NamedTuple


class Facts(NamedTuple):
    """What tells one rule from another (paper, section 4)."""

    residual: bool  # writes v - S'x (regression) rather than v (inner product)
    per_channel: bool  # one step size and one decay per value channel rather than one per head
    sliding: bool  # writes every pair of a window rather than the newest one


RULES = {
    "falcon_1": Facts(residual=True, per_channel=False, sliding=False),
    "falcon_2": Facts(residual=True, per_channel=True, sliding=False),
    "falcon_3": Facts(residual=True, per_channel=False, sliding=True),
    "falcon_1a": Facts(residual=False, per_channel=False, sliding=False),
    "falcon_2a": Facts(residual=False, per_channel=True, sliding=False),
    "falcon_3a": Facts(residual=False, per_channel=False, sliding=True),
}

CHOICES = {
    "name": tuple(RULES),
    "alignment": ("next_latent", "same_step"),
    "timing": ("read_after_write", "read_before_write"),
    "step_size": ("gain", "direct"),
    "ridge": ("scale_coupled", "direct", "none"),
    "smoothness": ("exact", "bound", "trace"),
}

DEFAULT_WINDOW = 4
LARGEST_EXACT_WINDOW = 8
SMALLEST_PER_CHANNEL_DECAY = math.exp(-5)


@dataclass(frozen=True)
class Rule:
    """One update rule with its options.

    Args:
        name: `falcon_1`, `falcon_2`, `falcon_3` (regression writes) or `falcon_1a`, `falcon_2a`, `falcon_3a`
            (inner-product writes).
        window: nominal number of pairs W that a sliding rule writes at each token; 4 by default. Only for
            `falcon_3` and `falcon_3a`; the other rules have 1.
        alignment: `next_latent` pairs the previous token's key with this token's value, `same_step` the token's own.
        timing: `read_after_write`, or `read_before_write`, which reads the memory as the token found it.
        step_size: `gain` takes the dimensionless gain in [0, 2] and normalizes it; `direct` takes the step size itself,
            which the regression rules cap at 2 / (energy + ridge + epsilon). The paper names the direct variant and
            does not define it: this reading is ours.
        ridge: `scale_coupled` multiplies the ridge by the energy, `direct` takes it as it is, `none` has no decay.
        detach_energy: no gradient through the energy in a scale-coupled ridge (paper, C.6); on for sliding rules.
        smoothness: largest eigenvalue of the window for `falcon_3`: `exact`, `bound` ((tr G^16)^(1/16), at most 6 %
            above for four pairs), or `trace`. By default exact up to 8 pairs and the bound beyond.
        normalized_read: divides the read by the same recurrence run on ones (paper, C.1); inner-product rules only,
            for features that are never negative.
        epsilon: added to the denominator of the step size.
        decay_floor: smallest decay in one token; at least exp(-5) for `falcon_2` and `falcon_2a`.
        read_epsilon: added to the denominator of the normalized read.

    Raises:
        ValueError: for an unknown name and for options that contradict one another.
    """

    name: str
    window: int | None = None
    alignment: str = "next_latent"
    timing: str = "read_after_write"
    step_size: str = "gain"
    ridge: str = "scale_coupled"
    detach_energy: bool | None = None
    smoothness: str | None = None
    normalized_read: bool = False
    epsilon: float = 1e-6
    decay_floor: float = 0.01
    read_epsilon: float = 1e-6

    def __post_init__(self):
        for field in ("name", "alignment", "timing", "step_size", "ridge"):
            _check_choice(field, getattr(self, field))
        if self.window is None:
            object.__setattr__(self, "window", DEFAULT_WINDOW if self.sliding else 1)
        if not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1:
            raise ValueError(f"window is {self.window!r}; it must be a whole number of at least 1.")
        if self.window > 1 and not self.sliding:
            raise ValueError(
                f"window is {self.window}, but {self.name} writes one pair at a time; "
                "leave it out or use falcon_3 or falcon_3a."
            )
        if self.detach_energy is None:
            object.__setattr__(self, "detach_energy", self.sliding)
        if self.smoothness is None and self.name == "falcon_3":
            object.__setattr__(self, "smoothness", "exact" if self.window <= LARGEST_EXACT_WINDOW else "bound")
        if self.smoothness is not None:
            _check_choice("smoothness", self.smoothness)
            if self.name != "falcon_3":
                raise ValueError(
                    f"smoothness is {self.smoothness!r}, but only falcon_3 has one; leave it out for {self.name}."
                )
        if self.normalized_read and self.residual:
            raise ValueError(
                f"normalized_read is True, but {self.name} is a regression rule; "
                "it needs falcon_1a, falcon_2a or falcon_3a."
            )
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon is {self.epsilon}; it must be at least 0.")
        if not self.read_epsilon > 0:
            raise ValueError(f"read_epsilon is {self.read_epsilon}; it must be above 0.")
        if not 0 < self.decay_floor < 1:
            raise ValueError(f"decay_floor is {self.decay_floor}; it must lie between 0 and 1.")
        if self.per_channel and self.decay_floor < SMALLEST_PER_CHANNEL_DECAY:
            raise ValueError(
                f"decay_floor is {self.decay_floor}; for {self.name} it must be at least exp(-5), "
                f"about {SMALLEST_PER_CHANNEL_DECAY:.5f}."
            )

    @property
    def residual(self) -> bool:
        return RULES[self.name].residual

    @property
    def per_channel(self) -> bool:
        return RULES[self.name].per_channel

    @property
    def sliding(self) -> bool:
        return RULES[self.name].sliding

    @property
    def shifted(self) -> bool:
        """Whether the write feature is the previous token's key."""
        return self.alignment == "next_latent"


def _check_choice(field: str, value: object) -> None:
    if value not in CHOICES[field]:
        what = "rule" if field == "name" else field
        raise ValueError(f"{what} is {value!r}; it must be one of {', '.join(CHOICES[field])}.")
