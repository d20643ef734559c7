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
        self.finite: dict[str, Tensor] = {}  # in the order in which the tensors were made
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
        finite, self.finite = self.finite, {}
        if finite and not torch.stack(list(finite.values())).all():
            self._stop(next(place for place, is_finite in finite.items() if not is_finite))

    def _look_at_output(self, name: str, module: nn.Module, inputs: tuple, output) -> None:
        if not isinstance(output, Tensor) or not module.training:
            return
        self._look(f"The output of {name}", output)
        if output.requires_grad:
            output.register_hook(partial(self._look, f"The gradient at the output of {name}"))

    def _look(self, place: str, x: Tensor) -> None:
        is_finite = x.detach().isfinite().all()
        if x.device.type != "cpu":
            self.finite[place] = is_finite & self.finite.get(place, True)
        elif not is_finite:
            self._stop(place)

    def _stop(self, place: str) -> NoReturn:
        raise FloatingPointError(f"{place} is not finite at step {self.state.global_step + 1}.")
