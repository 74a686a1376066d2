"""Results of a dispatch, on their way from the device to the host."""

from dataclasses import dataclass

import jax
import numpy as np

from specjax.types import Logprobs


@dataclass(frozen=True)
class Dispatched:
    """Arrays whose copies to the host have begun."""

    tokens: jax.Array
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: jax.Array | None = None
    num_steps: int = 0  # what the round drafted; 0 for plain decoding and prefill

    def __post_init__(self) -> None:
        beside = self.logprobs, self.prompt_logprobs, self.hidden_states
        for array in jax.tree.leaves((self.tokens, beside)):
            array.copy_to_host_async()

    def read(self) -> np.ndarray:
        return np.asarray(self.tokens)

    def read_logprobs(self) -> Logprobs | None:
        """Wait for them, ``[rounds, bucket, A]`` or ``[chunks]``; ``None`` where no row asks.

        Entries behind the accepted tokens and of rows that do not ask for them are 0.
        """
        values: Logprobs | None = jax.tree.map(np.asarray, self.logprobs)
        return values

    def read_hidden_states(self) -> np.ndarray | None:
        """Wait for them, f32 ``[rounds, bucket, A, D]`` or ``[chunks, D]``; ``None`` likewise."""
        states = self.hidden_states
        return None if states is None else np.asarray(states).astype(np.float32)

    def read_prompt_logprobs(self) -> Logprobs | None:
        """Wait for those of the prompt token behind each of the packed tokens, ``[W]``."""
        values: Logprobs | None = jax.tree.map(np.asarray, self.prompt_logprobs)
        return values
