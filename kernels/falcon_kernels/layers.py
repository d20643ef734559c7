"""The recurrence as a layer, which Hugging Face's `kernels` can replace by that of another copy of these modules."""

import torch
from torch import Tensor, nn

from .api import FalconOutput, falcon_attention, falcon_step
from .rule import Rule
from .state import FalconState


class FalconAttention(nn.Module):
    """`falcon_attention`, and `falcon_step` for single tokens, without weights or state of its own."""

    can_torch_compile = True  # what `kernels` asks of a layer

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gain: Tensor,
        ridge: Tensor | None,
        rule: Rule,
        state: FalconState | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> FalconOutput:
        """Output [B, T, H, V], and the state after it where one is given.

        Args:
            q, k, v, gain, ridge, rule, mask, cu_seqlens: as in `falcon_attention`.
            state: to go on from. A single token without gradients updates it in place, else it stays as it is.
        """
        with_gradients = torch.is_grad_enabled() and v.requires_grad
        if state is not None and q.shape[1] == 1 and not with_gradients:
            token = [None if x is None else x[:, 0] for x in (q, k, v, gain, ridge)]
            output, state = falcon_step(*token, state, rule=rule, mask=None if mask is None else mask[:, 0])
            return FalconOutput(output[:, None], state)
        if state is not None and with_gradients:
            state = state.map(torch.clone)  # what backward reads is not overwritten
        return falcon_attention(
            q, k, v, gain, ridge, rule=rule, initial_state=state, output_final_state=state is not None,
            mask=mask, cu_seqlens=cu_seqlens,
        )  # fmt: skip
