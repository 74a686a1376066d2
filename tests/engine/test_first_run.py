"""Engines that compile on use, and engines that do not fit into free memory."""

import jax
import pytest

from specjax.runtime.runner import ModelRunner
from specjax.testing import Files


@pytest.mark.slow
def test_functions_are_compiled_at_their_first_use(files: Files) -> None:
    prompt, params = [5, 6, 7], {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}
    with files.small(speculative=False, compile_on_use=True) as engine:
        assert not engine.runner.compiled
        engine.generate(input_ids=prompt, sampling_params=params)
        assert sorted(str(key[0]) for key in engine.runner.compiled) == ["prefill", "round"]
        asked = {"return_logprob": True, "logprob_start_len": 0}
        engine.generate(input_ids=prompt, sampling_params=params, **asked)
        assert "prefill_logprobs" in {key[0] for key in engine.runner.compiled}


@pytest.mark.parametrize("reason", ["RESOURCE_EXHAUSTED: Out of memory", "INTERNAL: broken"])
def test_memory_that_others_use_is_named(files: Files, monkeypatch, reason) -> None:
    def load(*_: object) -> None:
        raise jax.errors.JaxRuntimeError(reason)

    monkeypatch.setattr(ModelRunner, "load", load)
    is_full = reason.startswith("RESOURCE")
    kind = ValueError if is_full else jax.errors.JaxRuntimeError
    with pytest.raises(kind, match="GB of weights and .* mem_frac" if is_full else "broken"):
        files.small(speculative=False, compile_on_use=True)
