"""``POST /v1/completions``: continues prompts in OpenAI's format."""

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.checks import is_integer, short
from specjax.sampling.params import SamplingParams
from specjax.scheduling.loop import Call
from specjax.scheduling.request import TokenLogprob, new_id
from specjax.server.answers import Answer, Result, Sent, Tops, completion_logprobs
from specjax.server.fields import (
    INPUTS,
    ApiError,
    Body,
    client_names,
    finish_fields,
    take_sampling,
)
from specjax.server.service import Service

DEFAULT_TOKENS = 16
MAX_LOGPROBS = 20


@client_names("prompt", top_logprobs_num="logprobs", input_ids="prompt")
def read_completion(service: Service, body: Body) -> tuple[Call, Answer]:
    model = service.check_model(body)
    prompt = service.take_inputs(body, "prompt")
    if not prompt and prompt != "":
        raise ApiError(400, f"prompt must be {INPUTS}", param="prompt")
    prompts = prompt if isinstance(prompt, list) and not is_integer(prompt[0]) else [prompt]
    is_text = isinstance(prompts[0], str)
    echo, logprobs = body.flag("echo"), body.integer("logprobs", at_least=0, at_most=MAX_LOGPROBS)
    is_stream, shown = take_shown(body)
    params = take_params(body, DEFAULT_TOKENS)
    finish_fields(body, service.ignored_fields)
    service.check_count(len(prompts) * params.n)
    request_id = f"cmpl-{new_id()}"
    is_batch = len(prompts) > 1
    call = service.engine.make_call(
        stream=is_stream,
        sampling_params=params,
        rid=[f"{request_id}-{i}" for i in range(len(prompts))] if is_batch else request_id,
        return_logprob=logprobs is not None,
        top_logprobs_num=logprobs or 0,
        logprob_start_len=0 if echo and logprobs is not None else -1,
        **{"prompt" if is_text else "input_ids": prompts if is_batch else prompts[0]},
    )
    prompt_ids = [request.input_ids for request in call.requests[:: params.n]]
    echoed = None
    if echo:
        echoed = list(prompts) if is_text else [service.texts.decode(ids) for ids in prompt_ids]
    return call, CompletionAnswer(
        id=request_id,
        model=model,
        texts=service.texts,
        params=params,
        prompt_ids=prompt_ids,
        wants_logprobs=logprobs is not None,
        echoed=echoed,
        **shown,
    )


def take_shown(body: Body) -> tuple[bool, dict[str, bool]]:
    """Take ``stream`` and the flags of optional output: usage, drafts and token ids."""
    is_stream = body.flag("stream")
    has_options = "stream_options" in body
    options = body.fields("stream_options")
    if has_options and not is_stream:
        raise ApiError(400, "stream_options needs stream=true", param="stream_options")
    shown = {name: options.flag(name) for name in ("include_usage", "include_drafts")}
    for ignored in ("include_obfuscation", "continuous_usage_stats"):
        options.take(ignored)
    if options.left:
        message = f"stream_options: unknown field {options.left[0]!r}"
        raise ApiError(400, message, param="stream_options", code="unknown_field")
    return is_stream, shown | {"return_ids": body.flag("return_token_ids")}


def take_params(body: Body, max_tokens: int) -> SamplingParams:
    """Read sampling parameters; ``best_of`` must equal ``n``."""
    params = take_sampling(body, max_tokens)
    best_of = body.take("best_of", params.n)
    if best_of != params.n or isinstance(best_of, bool):
        message = f"best_of={short(best_of)} must equal n={params.n}; samples are not ranked"
        raise ApiError(400, message, param="best_of", code="unsupported_field")
    return params


@dataclass(eq=False, kw_only=True)
class CompletionAnswer(Answer):
    """A choice has a ``text``. If ``echoed`` lists the prompts, the text begins with its prompt."""

    echoed: Sequence[str] | None = None

    kind = chunk_kind = "text_completion"

    def message(self, index: int, text: str) -> Result:
        return {"text": self._prompt(index) + text}

    def opening(self, index: int) -> Result | None:
        return None if self.echoed is None else {"text": self._prompt(index)}

    def part(self, text: str) -> Result:
        return {"text": text}

    def logprobs(self, sent: Sent, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        lists, sent.offset = completion_logprobs(self.texts, chosen, tops, sent.offset)
        return lists

    def _prompt(self, index: int) -> str:
        return "" if self.echoed is None else self.echoed[index // self.params.n]
