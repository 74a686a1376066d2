"""From the arguments of ``generate`` to the requests that the engine runs."""

import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.config import ModelConfig
from specjax.engine.args import check_timeout
from specjax.engine.inputs import (
    check_ids,
    check_vocabulary,
    for_each_input,
    need_tokenizer,
    tokenize_inputs,
)
from specjax.engine.streams import Batch
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

Params = SamplingParams | Mapping[str, Any] | None

# 2**64 over the golden ratio: multiples of it spread over all seeds, far from a caller's own
SEED_STRIDE = 0x9E3779B97F4A7C15


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of an input with ``sampling_seed=seed``.

    Sample 0 has the seed itself, and every sample is what its own seed gives with ``n=1``.
    """
    return (seed + index * SEED_STRIDE) % 2**64


class RequestFactory:
    """Makes the requests of a call; used by several threads at once.

    Args:
        config: the target's.
        tokenizer: ``None`` where only ``input_ids`` can be served.
        context_length: prompt and completion together.
        num_steps: drafted tokens a round; 0 for plain decoding.
        seed: of the noise of requests that bring no ``sampling_seed``.
        timeout: seconds for calls that bring none, ``None`` for no limit.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        context_length: int,
        num_steps: int,
        seed: int,
        timeout: float | None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._num_steps = num_steps
        self._timeout = timeout
        self._rng = np.random.default_rng(seed)
        self._rng_lock = threading.Lock()

    def make(
        self,
        *,
        prompt: Any,
        sampling_params: Params | Sequence[Params],
        input_ids: Any,
        messages: Any,
        rid: Any,
        return_logprob: Any,
        top_logprobs_num: Any,
        timeout: float | None,
    ) -> Batch:
        """The requests of one call; the arguments are those of :meth:`Engine.generate`.

        Raises:
            ValueError: for inputs or parameters that cannot be served.
        """
        inputs, is_batch = tokenize_inputs(self._tokenizer, prompt, input_ids, messages)
        for ids in inputs:
            check_ids(ids, self._config.vocab_size, self._context_length)
        count = len(inputs)
        check_timeout("timeout", timeout)
        timeout = self._timeout if timeout is None else timeout
        given = for_each_input("sampling_params", sampling_params, count)
        params = [SamplingParams.of(one) for one in given]
        num_samples = {one.n for one in params}
        if len(num_samples) > 1:
            raise ValueError(
                f"n={sorted(num_samples)} in one call; give all inputs the same n, or call twice"
            )
        tops = _top_logprobs(return_logprob, top_logprobs_num, count)
        rids = _rids(rid, count, is_batch)
        requests: list[Request] = []
        groups: list[str] = []
        for i, (ids, one) in enumerate(zip(inputs, params, strict=True)):
            for sample in range(one.n):
                requests.append(
                    self._request(
                        rids[i] if one.n == 1 else f"{rids[i]}_{sample}",
                        ids,
                        one,
                        sample,
                        top_logprobs=tops[i],
                        timeout=timeout,
                    )
                )
                groups.append(rids[i])
        return Batch(requests, groups, is_batch or any(one.n > 1 for one in params))

    def _request(
        self,
        rid: str,
        ids: list[int],
        params: SamplingParams,
        sample: int,
        *,
        top_logprobs: int,
        timeout: float | None,
    ) -> Request:
        config = self._config
        if params.stop_strings:
            need_tokenizer(self._tokenizer, "stop")
        ends = set(params.stop_token_ids or ())
        check_vocabulary("stop_token_ids", sorted(ends), config.vocab_size)
        if not params.ignore_eos:
            ends |= set(config.eos_token_ids)
        if params.sampling_seed is None:
            with self._rng_lock:
                seed = int(self._rng.integers(2**63))
        else:
            seed = sample_seed(params.sampling_seed, sample)
        return Request(
            rid,
            ids,
            params,
            seed=seed,
            max_new_tokens=min(params.max_new_tokens, self._context_length - len(ids)),
            end_token_ids=frozenset(ends),
            decoder=None if self._tokenizer is None else IncrementalDecoder(self._tokenizer),
            spec_width=self._num_steps,
            return_logprob=top_logprobs >= 0,
            top_logprobs_num=max(top_logprobs, 0),
            timeout=timeout,
        )


def _rids(rid: Any, count: int, is_batch: bool) -> list[str]:
    """An id for each input: the caller's, or new ones."""
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    is_list = isinstance(rid, Sequence) and not isinstance(rid, str)
    rids = list(rid) if is_batch and is_list else [rid]
    if len(rids) != count or not all(isinstance(one, str) and one for one in rids):
        kind = f"a list of {count} texts" if is_batch else "a text"
        raise ValueError(f"rid={rid!r} must be {kind}, none empty")
    if len(set(rids)) != count:
        raise ValueError(f"rid={rid!r} names an id twice")
    return rids


def _top_logprobs(return_logprob: Any, top_logprobs_num: Any, count: int) -> list[int]:
    """For each input how many of the best tokens to report; -1 for no log probabilities at all."""
    wanted = for_each_input("return_logprob", return_logprob, count)
    numbers = for_each_input("top_logprobs_num", top_logprobs_num, count)
    for is_wanted, number in zip(wanted, numbers, strict=True):
        if not isinstance(is_wanted, bool):
            raise ValueError(f"return_logprob={is_wanted!r} must be a bool")
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise ValueError(f"top_logprobs_num={number!r} must be an integer of at least 0")
        if number and not is_wanted:
            raise ValueError(f"top_logprobs_num={number} needs return_logprob=True")
    return [n if is_wanted else -1 for is_wanted, n in zip(wanted, numbers, strict=True)]
