"""``/v1/completions``: texts that continue a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.checks import is_integer
from specjax.scheduling.loop import Call
from specjax.scheduling.request import TokenLogprob, new_id
from specjax.server.answers import LEAST, MAX_LOGPROBS, ChoicesAnswer, Cursor, Result, Tops, finite
from specjax.server.fields import INPUTS, ApiError, Body, client_names, finish_fields
from specjax.server.parameters import take_output, take_params, take_routes
from specjax.server.service import Service

DEFAULT_TOKENS = 16


def read_completion(service: Service, body: Body) -> tuple[Call, ChoicesAnswer]:
    with client_names("prompt", body.sources, top_logprobs_num="logprobs", input_ids="prompt"):
        return _completion(service, body)


def _completion(service: Service, body: Body) -> tuple[Call, ChoicesAnswer]:
    model = service.check_model(body)
    prompt = service.take_inputs(body, "prompt")
    if not prompt and prompt != "":
        raise ApiError(400, f"prompt must be {INPUTS}", param="prompt")
    prompts = prompt if isinstance(prompt, list) and not is_integer(prompt[0]) else [prompt]
    is_text = isinstance(prompts[0], str)
    echo, logprobs = body.flag("echo"), body.integer("logprobs", at_least=0, at_most=MAX_LOGPROBS)
    is_stream, flags = take_output(body)
    params = take_params(body, service.default_max_tokens or DEFAULT_TOKENS)
    options = take_routes(body)
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
        **options,
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
        **flags,
    )


@dataclass(eq=False, kw_only=True)
class CompletionAnswer(ChoicesAnswer):
    """A choice has a ``text``. If ``echoed`` lists the prompts, the text begins with its prompt."""

    echoed: Sequence[str] | None = None

    kind = chunk_kind = "text_completion"

    def message(self, index: int, result: Result) -> Result:
        return {"text": self._prompt(index) + result["text"]}

    def opening(self, index: int) -> Result | None:
        return None if self.echoed is None else {"text": self._prompt(index)}

    def piece(self, text: str) -> Result:
        return {"text": text}

    def logprobs(self, sent: Cursor, chosen: Sequence[TokenLogprob], tops: Tops) -> Result:
        """Return lists with an entry per token; the first prompt token has no value."""
        rows: list[tuple[Any, ...]] = []
        for i, (value, token, _) in enumerate(chosen):
            text, data = self.texts.of(token)
            best: dict[str, float] | None = None
            if value is not None:
                value, best = finite(value), {}
                for top, other, _ in (tops[i] or ()) if tops else ():
                    assert top is not None
                    best.setdefault(self.texts.of(other)[0], finite(top))
                # if two tokens have the same text, the more likely one counts
                best[text] = max(best.get(text, LEAST), value)
            rows.append((text, value, best, sent.offset))
            if not self.texts.is_special(token):
                # count bytes that begin a character: all except UTF-8 continuation bytes
                sent.offset += sum(byte & 0xC0 != 0x80 for byte in data)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}

    def _prompt(self, index: int) -> str:
        return "" if self.echoed is None else self.echoed[index // self.params.n]
