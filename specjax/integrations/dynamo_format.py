"""Dynamo's requests and chunks, which are dictionaries, in the terms of the engine.

The keys are those of ``GenerateRequest`` and ``GenerateChunk`` in ``dynamo.common.backend`` 1.6.
"""

from collections.abc import Mapping
from typing import Any

from specjax.checks import ParameterError, refused
from specjax.sampling.params import ALIASES, choice_grammar

# Dynamo's sampling option or stop condition -> the sampling parameter
PARAMETERS = ALIASES | {"max_thinking_tokens": "thinking_token_budget"}
PARAMETERS |= {
    name: name
    for name in "temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty ignore_eos".split()
}
STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# Dynamo's frontend searches the text for stop strings, and then stops the request
OF_THE_FRONTEND = ("stop", "include_stop_str_in_output")
GRAMMARS = {"json": "json_schema", "grammar": "ebnf"} | {x: x for x in ("regex", "structural_tag")}
# Values of other fields that change nothing. Dynamo reads no further tokens after the first finish
# reason, so a request has one sample.
NEUTRAL = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}
# input that is not text
MEDIA = ("multi_modal_data", "prompt_embeds", "encoder_result")


def generate_arguments(request: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Return the arguments of ``Engine.async_generate``, except those of log-probabilities.

    A request without ``max_tokens`` may use the rest of ``context_length`` tokens.

    Raises ValueError for a field that the engine does not support.
    """
    for name in MEDIA:
        if request.get(name):
            raise ParameterError(f"{name} is not supported; send text only", param=name)
    fields = _fields(request, "sampling_options") | _fields(request, "stop_conditions")
    ends = [token for name in STOP_IDS for token in fields.pop(name, ())]
    params: dict[str, Any] = {"max_new_tokens": context_length, "stop_token_ids": sorted(set(ends))}
    params |= _grammar(_fields(fields, "guided_decoding"))
    fields.pop("guided_decoding", None)
    params |= {PARAMETERS[name]: fields.pop(name) for name in PARAMETERS if name in fields}
    if params.get("top_k") == 0:
        params["top_k"] = -1  # off in vLLM
    if "sampling_seed" in params:
        params["sampling_seed"] %= 2**64  # Dynamo's seeds have a sign
    for name, value in fields.items():
        if name not in OF_THE_FRONTEND and value != NEUTRAL.get(name):
            raise refused(name, value, "is not supported; leave it out")
    if salt := _fields(request.get("extra_args") or {}, "nvext").get("cache_salt"):
        params["cache_salt"] = salt
    return {"input_ids": request["token_ids"], "sampling_params": params}


def chunk(output: Mapping[str, Any], num_sent: int) -> dict[str, Any]:
    """Return Dynamo's chunk with the tokens of a cumulative output after the first ``num_sent``."""
    meta, reason = output["meta_info"], output["meta_info"]["finish_reason"]
    result: dict[str, Any] = {"index": 0, "token_ids": output["output_ids"][num_sent:]}
    if "output_token_logprobs" in meta:
        result["log_probs"] = [value for value, *_ in meta["output_token_logprobs"][num_sent:]]
    if top := meta.get("output_top_logprobs"):
        result["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": None, "logprob": value}
                for rank, (value, token, _) in enumerate(entries, 1)
            ]
            for entries in top[num_sent:]
        ]
    if reason is not None:
        num_prompt, num_completion = meta["prompt_tokens"], meta["completion_tokens"]
        result["finish_reason"] = _finish_reason(reason)
        result["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
        }
    return result


def _fields(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a part of a request that are set."""
    return {key: value for key, value in (request.get(name) or {}).items() if value is not None}


def _grammar(limits: dict[str, Any]) -> dict[str, Any]:
    limits.pop("backend", None)  # names a library for the same grammar
    if choices := limits.pop("choice", None):
        limits["grammar"] = choice_grammar(choices)
    for name, value in limits.items():
        if name not in GRAMMARS:
            raise refused(f"guided_{name}", value, "is not supported; leave it out")
    return {GRAMMARS[name]: value for name, value in limits.items()}


def _finish_reason(reason: Mapping[str, Any]) -> str:
    if reason["type"] != "abort":
        return str(reason["type"])
    return f"error: {reason['message']}" if "message" in reason else "cancelled"
