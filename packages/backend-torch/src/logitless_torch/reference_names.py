"""`FusedLinearForPPO`, under the name and with the signature of the design that this project replaces."""

from __future__ import annotations

from torch import Tensor, nn

from logitless import linear_log_probs
from logitless.errors import InputTypeError, InvalidInputError

__all__ = ["FusedLinearForPPO"]


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies by chunks of tokens; `logitless.linear_log_probs` has it all.

    Args:
        chunk_size: tokens whose float32 logits would fit into the temporary memory that a call takes.

    Raises:
        InputTypeError, InvalidInputError: chunk_size is no positive integer.
    """

    def __init__(self, chunk_size: int = 512) -> None:
        super().__init__()
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
            raise InputTypeError(f"chunk_size: got {chunk_size!r}, expected an integer")
        if chunk_size < 1:
            raise InvalidInputError(f"chunk_size: got {chunk_size}, expected a positive number of tokens")
        self.chunk_size = chunk_size

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(log_probs, entropy), of input_ids' shape, float32 (float64 for float64), in nats; both differentiable.

        Args:
            hidden_states: [T, D] or [B, S, D].
            vocab_weights: [V, D].
            input_ids: [T] or [B, S], the token that each hidden state predicts: already shifted.
            temperature: a positive number that divides the logits.

        Raises:
            InputTypeError, InvalidInputError: as of `linear_log_probs`, which calls these hidden, head.weight and
                labels.
        """
        # What is no matrix is for the validator, which names it.
        rows = len(vocab_weights) if isinstance(vocab_weights, Tensor) and vocab_weights.ndim else 0
        out = linear_log_probs(
            hidden_states,
            vocab_weights,
            input_ids,
            temperature=temperature,
            workspace_bytes=4 * self.chunk_size * max(1, rows),
            backend="torch",
        )
        assert out.entropy is not None
        return out.log_probs, out.entropy
