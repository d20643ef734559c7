"""Stops a training run at its first NaN or infinity and says in which module that arose."""

from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState


class StopAtNonFinite(TrainerCallback):
    """Ends training with a FloatingPointError that names the first module with a NaN or an infinity.

    ```python
    trainer = Trainer(model, arguments, train_dataset=..., callbacks=[StopAtNonFinite()])
    ```

    Looks at the output of every module and at the gradient there: on the CPU at once, elsewhere (where to ask is to
    wait) when the gradients of a step are complete, before the optimizer can spread the damage to all weights. Not for
    torch_compile, which joins modules, nor for fp16, where infinite gradients are how its loss scale is found.
    """

    def __init__(self):
        self.largest: dict[str, Tensor] = {}  # absolute value, NaN where there is one; in the order of the tensors
        self.state: TrainerState | None = None
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        for option in ("torch_compile", "fp16"):
            if getattr(args, option):
                raise ValueError(f"{option} is True, but StopAtNonFinite works without it only; turn one of them off.")
        self.state = state
        for name, module in model.named_modules():
            self.hooks.append(module.register_forward_hook(partial(self._look_at_output, name or "the model")))

    def on_train_end(self, args, state, control, **kwargs):
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        largest, self.largest = self.largest, {}
        if largest:
            finite = torch.stack([x.float() for x in largest.values()]).isfinite().tolist()
            if not all(finite):
                self._stop(list(largest)[finite.index(False)])

    def _look_at_output(self, name: str, module: nn.Module, inputs: tuple, output) -> None:
        if not module.training or not isinstance(output, Tensor):
            return
        if not output.is_floating_point() or output.numel() == 0:
            return
        self._look(f"The output of {name}", output)
        if output.requires_grad:
            output.register_hook(partial(self._look, f"The gradient at the output of {name}"))

    def _look(self, place: str, x: Tensor) -> None:
        largest = torch.linalg.vector_norm(x.detach(), torch.inf)  # one pass over x
        if x.device.type != "cpu":
            before = self.largest.get(place)
            self.largest[place] = largest if before is None else torch.maximum(largest, before)
        elif not largest.isfinite():
            self._stop(place)

    def _stop(self, place: str) -> NoReturn:
        raise FloatingPointError(f"{place} is not finite at step {self.state.global_step + 1}.")
