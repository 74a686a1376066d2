"""``/v1/decisions``: OpenAI's Decisions API, which answers questions with probabilities.

The model sees the options of a question with labels. The probability of an option is that of its
label as the beginning of the model's reply, among the labels of all options.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product, takewhile
from string import ascii_uppercase
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from specjax.checks import short
from specjax.engine.requests import refuse_length, render_conversation
from specjax.scheduling.loop import Call
from specjax.scheduling.request import new_id
from specjax.server.answers import Answer, Result, finite
from specjax.server.exchange import dump
from specjax.server.fields import ApiError, Body, client_names
from specjax.server.service import Service
from specjax.text.reasoning import END, START

# Maximum number of prompt tokens of all options. Each option is a prompt of its own, although their
# KV is shared, and a token of a prompt takes 8 bytes.
MAX_TOKENS = 2**24
LAST_LINE = "Reply with the label of one option."


class _Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    """An object of a request; unknown fields are refused, as in the API."""


class _Text(_Strict):
    type: Literal["input_text"]
    text: str


class _Message(_Strict):
    role: Literal["user"]
    content: str | list[_Text]
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(item.text for item in self.content)


class _Option(_Strict):
    value: str | bool  # true and "true" are two options
    description: str | None = None


class _Level(_Strict):
    label: str
    description: str | None = None


class Predicate(_Strict, tag="predicate"):
    """Whether the instructions are true."""

    instructions: str
    name: str | None = None

    @property
    def options(self) -> list[str]:
        """The options as the model sees them."""
        return ["false", "true"]

    def answer(self, probabilities: Sequence[float], confidence: float) -> Result:
        return {"probability": probabilities[1]}


class Choice(_Strict, tag="choice"):
    """Which of several values is right."""

    instructions: str
    choices: Annotated[list[_Option], Meta(min_length=2, max_length=255)]
    name: str | None = None

    def __post_init__(self) -> None:
        _check_distinct("value", [option.value for option in self.choices])

    @property
    def options(self) -> list[str]:
        values = (json.dumps(option.value, ensure_ascii=False) for option in self.choices)
        return list(map(_describe, values, self.choices))

    def answer(self, probabilities: Sequence[float], confidence: float) -> Result:
        values = [option.value for option in self.choices]
        return {
            "choice": values[probabilities.index(max(probabilities))],
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(values, probabilities, strict=True)
            ],
            "confidence": confidence,
        }


class Score(_Strict, tag="score"):
    """Which level of a scale is right; the answer is the mean of their indices."""

    instructions: str
    levels: Annotated[list[_Level], Meta(min_length=2, max_length=10)]
    name: str | None = None

    def __post_init__(self) -> None:
        _check_distinct("label", [level.label for level in self.levels])

    @property
    def options(self) -> list[str]:
        labels = (level.label for level in self.levels)
        return list(map(_describe, labels, self.levels))

    def answer(self, probabilities: Sequence[float], confidence: float) -> Result:
        return {
            "score": math.fsum(i * probability for i, probability in enumerate(probabilities)),
            "probabilities": [
                {"value": i, "label": level.label, "probability": probability}
                for i, (level, probability) in enumerate(
                    zip(self.levels, probabilities, strict=True)
                )
            ],
            "confidence": confidence,
        }


Question: TypeAlias = Predicate | Choice | Score
Questions = Annotated[list[Question], Meta(min_length=1, max_length=200)]


def _check_distinct(name: str, values: Sequence[Any]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"each {name} must be different from the others")


def _describe(text: str, option: _Option | _Level) -> str:
    return f"{text}: {option.description}" if option.description else text


def read_decision(service: Service, body: Body) -> tuple[Call, "DecisionAnswer"]:
    """Check a request, and tokenise a prompt for each option of each question."""
    model = service.check_model(body)
    demand = "a text, or messages of the role user with texts or parts of the type input_text"
    content: str | list[_Message] = _convert(body, "input", str | list[_Message], demand)
    demand = "1 to 200 questions: predicate, choice (2 to 255 choices) or score (2 to 10 levels)"
    questions: list[Question] = _convert(body, "questions", Questions, demand)
    body.text("safety_identifier")
    if body.unread:
        message = f"unknown field {short(body.unread[0])}; send only model, input and questions"
        raise ApiError(400, message, param=body.unread[0], code="unknown_field")
    if not isinstance(content, str):
        content = "\n\n".join(message.text for message in content)
    service.check_count(sum(len(question.options) for question in questions))
    if service.tokenizer.chat_template is None:
        raise ApiError(400, "decisions need a chat template; start the server with --chat-template")
    prompts: list[list[int]] = []
    starts: list[int] = []
    num_prompt_tokens, num_tokens = [], 0
    request_id = f"decision-{new_id()}"
    with client_names("input", input_ids="input"):
        for question in questions:
            prompt, labels = encode_question(service, content, question)
            num_tokens += len(labels) * len(prompt)
            if num_tokens > MAX_TOKENS:
                raise ApiError(
                    400,
                    f"the options of all questions need more than {MAX_TOKENS} prompt tokens; send "
                    "fewer questions in one request",
                    param="questions",
                )
            num_prompt_tokens.append(len(prompt))
            prompts += [prompt + label for label in labels]
            starts += [len(prompt) - 1] * len(labels)
        call = service.engine.make_call(
            input_ids=prompts,
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
            rid=[f"{request_id}-{i}" for i in range(len(prompts))],
            return_logprob=True,
            logprob_start_len=starts,
        )
    return call, DecisionAnswer(model, questions, num_prompt_tokens)


def _convert(body: Body, name: str, kind: Any, demand: str) -> Any:
    """Take a field as a value of a type. Raises ApiError with the path of what is wrong."""
    try:
        return msgspec.convert(body.take(name), kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        message = f"{name}{path.rstrip('`')}: {reason}; {name} must be {demand}"
        code = "unknown_field" if "unknown field" in reason else None
        raise ApiError(400, message, param=name, code=code) from None


def make_labels(count: int) -> list[str]:
    """Return labels of equally many letters, so that none is the beginning of another."""
    letters = product(ascii_uppercase, repeat=1 if count <= len(ascii_uppercase) else 2)
    return ["".join(label) for label in islice(letters, count)]


def encode_question(
    service: Service, text: str, question: Question
) -> tuple[list[int], list[list[int]]]:
    """Return the token ids of a prompt, and those of each label as the model's reply to it.

    Raises ValueError if the prompt does not fit, or if no label can follow it.
    """
    tokenizer, length = service.tokenizer, service.engine.context_length
    options = question.options
    labels = make_labels(len(options))
    lines = [f"{label}: {option}" for label, option in zip(labels, options, strict=True)]
    content = "\n".join([text, "", question.instructions, *lines, LAST_LINE])
    messages = [{"role": "user", "content": content}]
    rendered = render_conversation(tokenizer, length, messages, enable_thinking=False)
    rendered += "" if service.engine.reasoning is None else service.engine.reasoning.opening
    prompt = tokenizer.encode(rendered, add_special_tokens=False)
    if len(prompt) >= length:
        refuse_length(len(prompt), length)
    # only the end of the prompt can change how a label is tokenised
    end = rendered[max(0, rendered.rfind(LAST_LINE)) :]
    if end.rfind(START) > end.rfind(END):
        raise ValueError("the chat template begins the reply with reasoning; use another model")
    end_ids = tokenizer.encode(end, add_special_tokens=False)
    replies = [tokenizer.encode(end + label, add_special_tokens=False) for label in labels]
    # a label may become one token with the last characters of the prompt
    columns = zip(end_ids, *replies, strict=False)
    num_same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    prompt = prompt[: len(prompt) - len(end_ids) + num_same]
    label_ids = [ids[num_same:] for ids in replies]
    if not prompt or not all(label_ids) or len(set(map(tuple, label_ids))) < len(labels):
        raise ValueError("the tokenizer has no tokens for the labels A to Z; use another model")
    return prompt, label_ids


@dataclass(eq=False)
class DecisionAnswer(Answer):
    """Answers in the order of the questions. The results are those of all options in turn."""

    model: str
    questions: Sequence[Question]
    num_prompt_tokens: Sequence[int]  # by question, without the label

    text_only, wants_logprobs = True, False

    def body(self, results: Sequence[Result]) -> bytes:
        metas = (result["meta_info"] for result in results)
        answers, num_cached = [], 0
        for question, num_prompt in zip(self.questions, self.num_prompt_tokens, strict=True):
            of_options = list(islice(metas, len(question.options)))
            num_cached += min(num_prompt, of_options[0]["cached_tokens"])
            logprobs = list(map(_label_logprob, of_options))
            best = max(logprobs)
            weights = [math.exp(logprob - best) for logprob in logprobs]
            probabilities = [weight / math.fsum(weights) for weight in weights]
            # the confidence is low if the model would rather reply with something else
            answer = question.answer(probabilities, math.exp(best))
            kind = type(question).__struct_config__.tag
            answers.append({"type": kind, "name": question.name} | answer)
        num_input = sum(self.num_prompt_tokens)
        usage = {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input,
        }
        return dump({"model": self.model, "answers": answers, "usage": usage}).encode()

    def chunk(self, result: Result) -> bytes:
        raise NotImplementedError("decisions are not streamed")


def _label_logprob(meta: Result) -> float:
    """The log-probability of the prompt's tokens after the first one reported."""
    if meta["finish_reason"]["type"] == "abort":
        message = "a question was aborted; send the request again"
        raise ApiError(503, message, code="aborted")
    return finite(math.fsum(value for value, *_ in meta["input_token_logprobs"][1:]))
