"""What a dispatch leaves on the device for the host."""

from dataclasses import dataclass

import jax
import numpy as np

from specjax.types import Logprobs


@dataclass(frozen=True)
class HostLogprobs:
    """Log-probabilities beside the tokens of a dispatch, of the target's raw logits.

    Leading axes are ``[rounds, bucket, A]`` for rounds and ``[1]`` for a prefill. Entries behind
    the accepted tokens are 0, and so are those of rows that do not ask for them.
    """

    chosen: np.ndarray  # f32 [...]
    top_ids: np.ndarray  # i32 [..., N], the N most likely tokens in descending order
    top_values: np.ndarray  # f32 [..., N]


@dataclass(frozen=True)
class Dispatched:
    """Arrays on their way from the device to the host.

    ``num_steps`` is what the round drafted; 0 for plain decoding and prefill.
    """

    tokens: jax.Array
    logprobs: Logprobs | None = None
    num_steps: int = 0

    def __post_init__(self) -> None:
        for array in jax.tree.leaves((self.tokens, self.logprobs)):
            array.copy_to_host_async()

    def read(self) -> np.ndarray:
        """Wait for the tokens."""
        return np.asarray(self.tokens)

    def read_logprobs(self) -> HostLogprobs | None:
        """Wait for the log-probabilities; ``None`` where no row of the dispatch asks for them."""
        values = self.logprobs
        if values is None:
            return None
        return HostLogprobs(*map(np.asarray, (values.chosen, values.top_ids, values.top_values)))
