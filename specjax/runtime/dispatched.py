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
    num_steps: int = 0  # what the round drafted; 0 for plain decoding and prefill

    def __post_init__(self) -> None:
        for array in jax.tree.leaves((self.tokens, self.logprobs)):
            array.copy_to_host_async()

    def read(self) -> np.ndarray:
        return np.asarray(self.tokens)

    def read_logprobs(self) -> Logprobs | None:
        """Wait for them, ``[rounds, bucket, A]`` or ``[1]``; ``None`` where no row asks for them.

        Entries behind the accepted tokens and of rows that do not ask for them are 0.
        """
        values: Logprobs | None = jax.tree.map(np.asarray, self.logprobs)
        return values
