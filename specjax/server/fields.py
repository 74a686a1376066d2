"""Fields of OpenAI's requests that change nothing here, or that are refused by name."""

from typing import Any

from specjax.server.body import Body
from specjax.server.errors import ApiError

# about the caller, the account or the transport: the text would be the same
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls prediction separate_reasoning stream_reasoning log_metrics "
    "no_logs priority request_id".split()
)
_GRAMMAR = "constrained decoding is not supported"
_TOOLS = "tool calls are not supported"
_TEXT = "only text is supported"
_SPECIAL = "special tokens are always left out of the text"
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
    "audio": (_TEXT, ()),
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
    "no_stop_trim": ("stop strings are always cut from the text", (False,)),
    "include_stop_str_in_output": ("stop strings are always cut from the text", (False,)),
    "skip_special_tokens": (_SPECIAL, (True,)),
    "spaces_between_special_tokens": (_SPECIAL, (True, False)),
    "lora_path": ("adapters are not supported", ()),
    "chat_template": ("the checkpoint's own is used", ()),
    "documents": ("give them in chat_template_kwargs", ([],)),
    "reasoning_effort": ("give it in chat_template_kwargs", ()),
    "continue_final_message": ("an answer is always a new message", (False,)),
    "return_hidden_states": ("they are not sent over HTTP", (False,)),
    "return_bytes": ("answers are text", (False,)),
    "return_entropy": ("give return_logprob and top_logprobs_num", (False,)),
    "background": ("an answer is waited for", (False,)),
    "return_tokens_as_token_ids": ("logprobs name tokens by their text", (False,)),
}


def is_neutral(name: str, value: Any) -> bool:
    """Whether a field that is not supported asks for nothing."""
    if name not in REFUSED:
        return not value  # such as false, 0, "" or []
    return any(value == one and type(value) is type(one) for one in REFUSED[name][1])


def refuse_rest(body: Body) -> None:
    """Refuse fields that nobody has taken, by name, except those that change nothing."""
    for name in body.left:
        value = body.take(name)
        if name in IGNORED or is_neutral(name, value):
            continue
        if name not in REFUSED:
            raise ApiError(400, f"unknown field {name!r}", param=name, code="unknown_field")
        message = f"{name} is not supported: {REFUSED[name][0]}"
        raise ApiError(400, message, param=name, code="unsupported_field")
