"""Acme's own model: a causal language model whose tokens see the mean of those before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AcmeModel(nn.Module):
    """Token ids [B, S] to logits [B, S, V]; with one output, the value of each token."""

    def __init__(self, hidden_size: int, outputs: int, vocab_size: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.mix = nn.Linear(2 * hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, outputs, bias=False)

    def trunk(self, input_ids: Tensor) -> Tensor:
        """[B, S] to [B, S, D]."""
        x = self.embed(input_ids)
        seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)
        return torch.tanh(self.mix(torch.cat((x, x.cumsum(1) / seen), -1)))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.trunk(input_ids))
