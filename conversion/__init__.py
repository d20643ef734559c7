"""Conversion between Falcon checkpoints and the checkpoints of related models.

`convert` goes from folder to folder, as the command `falcon-hf convert` does; a plan goes from dict to dict:

```python
account = convert(Path("delta_net-1.3B"), Path("my-falcon"))
plan = make_plan(Checkpoint.of(config, tensors), keep_attention=[0, 8, 16])
new_config, new_tensors = plan.config, plan.apply(tensors)
```

What becomes what, what stays the same function and what does not is in `conversion/README.md`.
"""

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
