"""Fields of requests that change nothing here, that are refused by name, or that are unknown."""

import logging
from difflib import get_close_matches
from typing import Any

from specjax.checks import short
from specjax.server.body import Body
from specjax.server.errors import ApiError
from specjax.server.sampling import NAMES

logger = logging.getLogger(__name__)

MAX_NAMES, MAX_NAME = 32, 64  # that are logged, and characters of one
LIKENESS = 0.8  # of a misspelt name, up to 1
MAX_COMPARED = 16  # unknown names of a request that are compared with known ones, 70 us each

# about the caller, the account or the transport: the text would be the same
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls prediction separate_reasoning stream_reasoning log_metrics "
    "no_logs priority request_id".split()
)
_GRAMMAR = "constrained decoding is not supported"
_TOOLS = "tool calls are not supported; with tool_choice 'none' the template sees tools"
_TEXT = "only text is supported"
_SAMPLER = "this way to sample is not supported"
# why a field is refused, and the values that ask for nothing
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "response_format": (_GRAMMAR, ({"type": "text"},)),
    **dict.fromkeys(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema "
        "regex ebnf structural_tag grammar".split(),
        (_GRAMMAR, ()),
    ),
    "tools": (_TOOLS, ([],)),
    "tool_choice": (_TOOLS, ("none", "auto")),
    "functions": (_TOOLS, ([],)),
    "function_call": (_TOOLS, ("none", "auto")),
    "web_search_options": (_TOOLS, ()),
    **dict.fromkeys(
        "audio image_data audio_data video_data multi_modal_data input_embeds".split(),
        (_TEXT, ([],)),
    ),
    "modalities": (_TEXT, (["text"],)),
    "mm_processor_kwargs": (_TEXT, ({},)),
    "suffix": ("text is only continued at its end", ("",)),
    "use_beam_search": ("beam search is not supported", (False,)),
    "length_penalty": ("beam search is not supported", (1, 1.0)),
    "prompt_logprobs": ("give echo and logprobs, or use /generate with logprob_start_len", ()),
    "truncate_prompt_tokens": ("prompts are not cut; shorten them", ()),
    "bad_words": ("give their tokens a logit_bias of -100", ([],)),
    "allowed_token_ids": (_GRAMMAR, ()),
    "logits_processors": ("custom logit processors are not supported", ([],)),
    "custom_logit_processor": ("custom logit processors are not supported", ()),
    "stop_regex": ("stop takes plain strings", ([],)),
    "spaces_between_special_tokens": ("the tokenizer decides", (True, False)),
    **dict.fromkeys(
        "typical_p top_a top_n_sigma tfs mirostat mirostat_mode dry_multiplier xtc_probability "
        "epsilon_cutoff eta_cutoff dynatemp_range".split(),
        (_SAMPLER, (0, 0.0)),
    ),
    "lora_path": ("adapters are not supported", ()),
    "chat_template": ("the checkpoint's own is used", ()),
    "documents": ("give them in chat_template_kwargs", ([],)),
    **dict.fromkeys(
        "reasoning_effort reasoning thinking enable_thinking verbosity".split(),
        ("give it in chat_template_kwargs", ()),
    ),
    "do_sample": ("give temperature, which is 0 for the likeliest tokens", ()),
    "prompt_embeds": (_TEXT, ()),
    "session_params": ("a request has its whole text", ()),
    "token_ids_logprob": ("give return_logprob and top_logprobs_num", ([],)),
    "lora_request": ("adapters are not supported", ()),
    "return_hidden_states": ("they are not sent over HTTP", (False,)),
    "return_bytes": ("answers are text", (False,)),
    "return_entropy": ("give return_logprob and top_logprobs_num", (False,)),
    "background": ("an answer is waited for", (False,)),
    "return_tokens_as_token_ids": ("logprobs name tokens by their text", (False,)),
}
# Fields that one route takes and another does not.
SAMPLING = frozenset((*NAMES, *NAMES.values()))
ELSEWHERE = SAMPLING | frozenset(
    "prompt messages text input_ids sampling_params echo logprobs top_logprobs return_logprob "
    "top_logprobs_num logprob_start_len max_completion_tokens".split()
)


class IgnoredFields:
    """Counts unknown fields of requests, and logs the first names once each."""

    def __init__(self) -> None:
        self.count = 0
        self._names: set[str] = set()

    def add(self, name: str) -> None:
        self.count += 1
        name = name[:MAX_NAME]
        if len(self._names) < MAX_NAMES and name not in self._names:
            self._names.add(name)
            logger.warning("the field %r of requests is unknown and ignored", name)


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field that is not supported asks for nothing."""
    if name in REFUSED:
        choices = REFUSED[name][1]
        return any(value == one and type(value) is type(one) for one in choices)
    return name not in SAMPLING and not value  # such as false, 0, "" or []


def finish_fields(body: Body, ignored: IgnoredFields) -> None:
    """Ignore the fields that nobody has taken, but refuse those that would change the answer.

    What looks like a misspelt name of a known field is refused too.
    """
    is_native = "sampling_params" in body.known
    known = {*body.known, *REFUSED}
    elsewhere = "give it in sampling_params" if is_native else "other routes do"
    num_compared = 0
    for name in body.left:
        value = body.take(name)
        if name in REFUSED or name in ELSEWHERE:
            if is_neutral(name, value):
                continue
            message = f"this route does not take {name}; {elsewhere}"
            if name in REFUSED:
                message = f"{name} is not supported: {REFUSED[name][0]}"
            raise ApiError(400, message, param=name, code="unsupported_field")
        if name in IGNORED:
            continue
        num_compared += 1
        if num_compared <= MAX_COMPARED and (
            near := get_close_matches(name[:MAX_NAME], known, 1, LIKENESS)
        ):
            message = f"unknown field {short(name)}; did you mean {near[0]!r}?"
            raise ApiError(400, message, param=name, code="unknown_field")
        ignored.add(name)
