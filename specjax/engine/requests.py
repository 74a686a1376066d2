"""Turn the arguments of ``generate`` into the requests that the engine runs."""

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from specjax.checks import CONTEXT_EXCEEDED, ParameterError, check_integer, is_integer, refused
from specjax.engine.plan import EnginePlan
from specjax.models.routes import Routes
from specjax.sampling.boundary import Boundary
from specjax.sampling.grammar_check import Grammars
from specjax.sampling.grammar_process import GrammarProcesses
from specjax.sampling.grammar_request import Grammar
from specjax.sampling.params import GRAMMARS, LISTS, SamplingParams
from specjax.scheduling.loop import Call
from specjax.scheduling.request import GenerateRequest, Request, new_id
from specjax.scheduling.scheduler import Scheduler
from specjax.text.parts import REASONING, Reasoning
from specjax.text.tokenizer import IncrementalDecoder, Tokenizer

Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Mapping[str, Any] | None

# OpenAI's limit
MAX_SAMPLES = 128
# 2**64 divided by the golden ratio; its multiples spread over all seeds, far from the caller's
SEED_STRIDE = 0x9E3779B97F4A7C15
# seed of requests without one if the engine is deterministic, as in SGLang
DEFAULT_SEED = 42


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of sample ``index``; a request with this seed gives the same text."""
    return (seed + index * SEED_STRIDE) % 2**64


def tokenize_inputs(
    tokenizer: Tokenizer | None,
    prompt: Any = None,
    input_ids: Any = None,
    messages: Any = None,
    *,
    vocab_size: float = math.inf,
    context_length: float = math.inf,
) -> tuple[list[list[int]], bool]:
    """Return the token ids of every input, and whether a list of inputs was given.

    Raw text gets the checkpoint's special tokens, ``messages`` get the chat template's.
    ``input_ids`` may be arrays. Raises ValueError if an input is invalid or too long.
    """
    inputs = {"prompt": prompt, "input_ids": input_ids, "messages": messages}
    names = [name for name, value in inputs.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"give exactly one of prompt, input_ids and messages; got {names}")
    rows: Iterable[list[int]]
    if input_ids is not None:
        rows, is_batch = _id_lists(input_ids)
    elif prompt is not None:
        tokenizer, is_batch = _need_tokenizer(tokenizer, "prompt"), not isinstance(prompt, str)
        texts = prompt if is_batch else [prompt]
        if not _is_list(texts) or not all(isinstance(text, str) for text in texts):
            raise refused("prompt", prompt, "must be a string or a list of strings")
        for text in texts:
            tokenizer.check_length(len(text), context_length)
        rows = map(tokenizer.encode, texts)
    else:
        tokenizer = _need_tokenizer(tokenizer, "messages")
        is_batch = _is_list(messages) and len(messages) > 0 and _is_list(messages[0])
        conversations = messages if is_batch else [messages]
        if not all(_is_list(chat) for chat in conversations):
            raise refused("messages", messages, "must be a list of messages or of such lists")
        rows = (encode_conversation(tokenizer, context_length, chat) for chat in conversations)
    checked = []
    for ids in rows:  # lazy: after one input is refused, later texts are not encoded
        if not ids:
            raise ValueError("an input has no tokens; it needs at least one")
        if len(ids) >= context_length:
            refuse_length(len(ids), context_length)
        _check_vocabulary("input_ids", ids, vocab_size)
        checked.append(ids)
    return checked, is_batch


def encode_conversation(
    tokenizer: Tokenizer, context_length: float, messages: Messages, /, **options: Any
) -> list[int]:
    """Return the token ids of :func:`render_conversation`."""
    text = render_conversation(tokenizer, context_length, messages, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def render_conversation(
    tokenizer: Tokenizer,
    context_length: float,
    messages: Messages,
    /,
    *,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Render a conversation with the chat template and ``variables``.

    With ``continue_final_message`` the text ends with the content of the last message. Characters
    are counted first; a conversation that is too long for the context raises ValueError.
    """
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    num_chars = sum(len(text) for text in contents if isinstance(text, str))
    tokenizer.check_length(num_chars, context_length)
    text = tokenizer.apply_chat_template(messages, **variables)
    if continue_final_message:
        text = _up_to_content(text, messages[-1].get("content"))
    tokenizer.check_length(len(text), context_length)
    return text


def _up_to_content(text: str, content: Any) -> str:
    """Cut a rendered conversation after its last content, as transformers does."""
    stripped = content.strip() if isinstance(content, str) else ""
    at = text.rfind(stripped)
    if not stripped or at < 0:
        raise ValueError(
            "continue_final_message=True needs a last message whose text appears unchanged in the "
            "rendered chat template"
        )
    prefix = text[: at + len(stripped)]
    # keep trailing spaces unless the template has stripped them
    end = content[len(content.rstrip()) :]
    return prefix + end if text.startswith(end, len(prefix)) else prefix


def refuse_length(num_tokens: int, context_length: float) -> NoReturn:
    """Raise the ParameterError for a prompt that leaves no token for a completion."""
    raise ParameterError(
        f"a prompt of {num_tokens} tokens must be shorter than context_length={context_length}; "
        "shorten the prompt or raise context_length",
        limit=context_length,
        code=CONTEXT_EXCEEDED,
    )


# sampling parameters that need a grammar process
LIMITS = (*GRAMMARS, "thinking_token_budget")


def has_grammar(params: Any) -> bool:
    """Whether sampling parameters, or any in a list, need a grammar process."""
    if isinstance(params, SamplingParams):
        return params.grammar is not None or params.thinking_token_budget is not None
    if isinstance(params, Mapping):
        return any(params.get(name) is not None for name in LIMITS)
    return _is_list(params) and any(map(has_grammar, params))


def make_grammars(plan: EnginePlan, tokenizer: Tokenizer | None) -> Grammars:
    args, config = plan.args, plan.target.config
    processes = GrammarProcesses(
        tokenizer=_need_tokenizer(tokenizer, "grammar_backend").backend.to_str(),
        vocab_size=config.vocab_size,
        end_token_ids=config.eos_token_ids,
        spaces=not args.constrained_json_disable_any_whitespace,
        num_slots=plan.config.num_slots,
        nodes=max(shape.nodes for shape in plan.config.shapes),
        width=1 + max(shape.steps for shape in plan.config.shapes),
    )
    return Grammars(processes)


class RequestFactory:
    """Makes the calls of an engine, in any thread; ``scheduler`` may refuse a request."""

    def __init__(self, plan: EnginePlan, tokenizer: Tokenizer | None, scheduler: Scheduler) -> None:
        has_grammars = plan.config.has_grammars
        self._grammars = make_grammars(plan, tokenizer) if has_grammars else None
        self.reasoning: Reasoning | None = None
        if (name := plan.args.reasoning_parser) is not None:
            self.reasoning = REASONING[name](_need_tokenizer(tokenizer, "reasoning_parser"))
        self._plan, self._tokenizer, self._scheduler = plan, tokenizer, scheduler
        self._rng = np.random.default_rng(plan.args.seed)
        self._rng_lock = threading.Lock()

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.processes.close()

    def make(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        *,
        stream: bool,
        input_ids: Any = None,
        messages: Any = None,
        rid: Any = None,
        **options: Any,
    ) -> Call:
        """Make the call of one :meth:`Engine.generate`; later changes to arguments have no effect.

        ``options`` are fields of :class:`GenerateRequest`: one value, or a list with one per input.
        """
        prompts, is_batch = tokenize_inputs(
            self._tokenizer,
            prompt,
            input_ids,
            messages,
            vocab_size=self._plan.target.config.vocab_size,
            context_length=self._plan.context_length,
        )
        count = len(prompts)
        values = _for_each_input("sampling_params", sampling_params, count)
        params_by_id = {id(value): SamplingParams.of(value) for value in values}
        params = [params_by_id[id(value)] for value in values]
        numbers = sorted({x.n for x in params})
        if len(numbers) > 1:
            message = f"n must be equal for all inputs of a call; got {numbers}"
            raise ParameterError(message, param="n")
        n = check_integer("n", numbers[0], 1, MAX_SAMPLES) if numbers else 1
        self._scheduler.check_queue(n * count)
        rids = _rids(rid, count, is_batch)
        lists = {name: _for_each_input(name, value, count) for name, value in options.items()}
        arguments = [
            GenerateRequest(
                rid=rids[i],
                input_ids=prompts[i],
                sampling_params=params[i],
                **{name: values[i] for name, values in lists.items()},
            )
            for i in range(count)
        ]
        with ExitStack() as on_error:
            requests = []
            for arg in arguments:
                if (grammar := self._grammar(arg.sampling_params, arg.input_ids)) is not None:
                    on_error.callback(grammar.close)
                for sample in range(n):
                    named = arg if n == 1 else replace(arg, rid=f"{arg.rid}_{sample}")
                    requests.append(self._request(named, sample, grammar))
            on_error.pop_all()
        groups = [name for name in rids for _ in range(n)]
        return Call(requests, groups=groups, is_batch=is_batch or n > 1, is_stream=stream)

    def _request(self, arguments: GenerateRequest, sample: int, grammar: Grammar | None) -> Request:
        config, params = self._plan.target.config, arguments.sampling_params
        if arguments.timeout is None:
            arguments = replace(arguments, timeout=self._plan.args.request_timeout)
        simulated, default = params.simulate_acceptance, self._plan.args.simulate_acceptance
        if simulated is None and default is not None:
            params = replace(params, simulate_acceptance=default)
            arguments = replace(arguments, sampling_params=params)
        elif simulated is not None and default is None:
            demand = "needs the engine option simulate_acceptance, which is None"
            raise refused("simulate_acceptance", simulated, demand)
        if params.stop_strings:
            _need_tokenizer(self._tokenizer, "stop")
        ends = set(params.stop_token_ids or ())
        _check_vocabulary("stop_token_ids", sorted(ends), config.vocab_size)
        if not params.ignore_eos:
            ends |= set(config.eos_token_ids)
            ends |= frozenset() if self.reasoning is None else self.reasoning.stop_ids
        is_deterministic = self._plan.config.deterministic
        if params.sampling_seed is None and not is_deterministic:
            with self._rng_lock:
                seed = int(self._rng.integers(2**63))
        else:
            given_seed = params.sampling_seed
            seed = sample_seed(DEFAULT_SEED if given_seed is None else given_seed, sample)
        # the prompt must fit; the completion is truncated
        room = min(self._plan.context_length, self._scheduler.max_tokens) - len(arguments.input_ids)
        decoder = None
        if self._tokenizer is not None:
            skips = params.skip_special_tokens
            decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=skips)
        request = Request(
            arguments,
            constraint=None if grammar is None else grammar.request(),
            seed=seed,
            max_new_tokens=min(params.max_new_tokens, max(1, room)),
            end_token_ids=frozenset(ends),
            decoder=decoder,
            spec_width=self._plan.config.kv_writes.accept_width - 1,
            spec_simulated=self._plan.config.simulate_accept_length,
            is_deterministic=is_deterministic,
            routes=Routes.wanted(
                self._plan.networks.target_config, arguments.return_routed_experts
            ),
        )
        self._scheduler.check(request)
        return request

    def _grammar(self, params: SamplingParams, prompt: Sequence[int]) -> Grammar | None:
        """Check the grammar of a request. Raises ParameterError."""
        if not has_grammar(params):
            return None
        args, budget = self._plan.args, params.thinking_token_budget
        size = self._plan.target.config.vocab_size
        _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), size)
        name, value = params.grammar or ("thinking_token_budget", budget)
        simulates = (args.simulate_accept_length, args.simulate_acceptance) != (None, None)
        if self._grammars is None:
            demand = (
                "needs the engine option grammar_backend='llguidance', with which a start compiles "
                "three more functions for each number of drafts and batch size"
            )
            raise refused(name, value, demand)
        if not self._plan.config.acceptance.is_coupled or simulates:
            demand = "needs an engine that accepts exactly the drafts that the target draws"
            raise refused(name, value, demand)
        boundary, (kind, text) = None, params.grammar or (None, "")
        if self.reasoning is not None:
            rules = text if kind == "ebnf" else ""
            fields = self.reasoning.boundary(prompt, rules, budget, is_list=kind in LISTS)
            boundary = None if fields is None else Boundary(**fields)
        elif budget is not None:
            demand = "needs the engine option reasoning_parser"
            raise refused("thinking_token_budget", budget, demand)
        if params.grammar is None and boundary is None:
            return None
        return self._grammars.check(kind, text, boundary)


def _rids(rid: Any, count: int, is_batch: bool) -> list[str]:
    if rid is None:
        return [new_id() for _ in range(count)]
    rids = list(rid) if is_batch and _is_list(rid) else [rid]
    if len(rids) != count or not all(isinstance(rid, str) and rid for rid in rids):
        kind = f"a list of {count} non-empty strings" if is_batch else "a non-empty string"
        raise refused("rid", rid, f"must be {kind}")
    if len(set(rids)) != count:
        raise refused("rid", rid, "must not repeat an id")
    return rids


def _for_each_input(name: str, value: Any, count: int) -> list[Any]:
    """Return one value per input: the items of a list, or the same value for all."""
    if not _is_list(value):
        return [value] * count
    if len(value) != count:
        message = f"{name} has {len(value)} values for {count} inputs; give one per input"
        raise ParameterError(message, param=name, limit=count)
    return list(value)


def _need_tokenizer(tokenizer: Tokenizer | None, option: str) -> Tokenizer:
    if tokenizer is None:
        message = f"{option} needs a tokenizer; give input_ids if skip_tokenizer_init is set"
        raise ParameterError(message, param=option)
    return tokenizer


def _check_vocabulary(name: str, ids: Sequence[int], vocab_size: float) -> None:
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        message = f"{name} must be in [0, {vocab_size}); got {wrong[:5]}"
        raise ParameterError(message, param=name, limit=vocab_size)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _id_lists(input_ids: Any) -> tuple[list[list[int]], bool]:
    plain = _without_arrays(input_ids)
    items = [_without_arrays(item) for item in plain] if _is_list(plain) else [None]
    is_batch = len(items) > 0 and not is_integer(items[0])
    rows: list[Any] = items if is_batch else [items]
    for row in rows:
        if not _is_list(row) or not all(is_integer(_without_arrays(i)) for i in row):
            raise refused("input_ids", input_ids, "must be a list of token ids or of such lists")
    return [[int(i) for i in row] for row in rows], is_batch


def _without_arrays(value: Any) -> Any:
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value
