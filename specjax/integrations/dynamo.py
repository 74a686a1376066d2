"""A worker of NVIDIA Dynamo 1.6, which sends token ids and gets token ids.

    python -m specjax.integrations.dynamo --model MODEL

Options are those of an engine, as ``specjax serve`` has them, and those of Dynamo's workers.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.logprobs import build_sglang_logprob_kwargs as logprob_arguments
from dynamo.common.backend.logprobs import extract_prompt_logprobs_from_sglang_meta
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.configuration.groups.runtime_args import (
    DynamoRuntimeArgGroup,
    DynamoRuntimeConfig,
)
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm import HttpError
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from specjax.checks import check_number
from specjax.cli.options import SERVING, add_engine_options, add_model, engine_arguments
from specjax.cli.parser import Parser, typed_name
from specjax.config import EMBEDDED_MODELS
from specjax.engine.args import EngineArgs, check_options
from specjax.engine.engine import Engine
from specjax.integrations.dynamo_format import chunk, generate_arguments
from specjax.scheduling.loop import EXIT_FAILED, EngineFault, exit_now
from specjax.scheduling.request import new_id
from specjax.scheduling.scheduler import QueueFullError

logger = logging.getLogger(__name__)

# Dynamo's frontend reads tool calls from the text, as --dyn-tool-call-parser says, and its router
# knows nothing of a split prefill.
OPTIONS = tuple(
    name for name in SERVING if name != "tool_call_parser" and not name.startswith("disaggregation")
)
ABORTED = {"type": "abort"}
POLL_SECONDS = 0.1
HEALTH_SECONDS = 1.0  # interval at which a worker looks whether its engine has failed


class Worker(LLMEngine):  # type: ignore[misc]
    """An engine for ``dynamo.common.backend.run``."""

    def __init__(self, options: dict[str, Any], name: str, shutdown_timeout: float) -> None:
        self._options, self._name, self._shutdown_timeout = options, name, shutdown_timeout
        self._engine: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._running: dict[str, Any] = {}  # request id of the engine -> Dynamo's context

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["Worker", WorkerConfig]:
        """Read the command line; wrong options end the process with status 2."""
        parser = Parser(
            prog="python -m specjax.integrations.dynamo",
            usage="%(prog)s [MODEL] [OPTION ...]",
            description="Serve a model as a worker of NVIDIA Dynamo.",
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        add_model(parser)
        text = "model name for clients (default: value of --model)"
        parser.add_argument("--served-model-name", metavar="TEXT", default=None, help=text)
        text = "seconds for requests to finish after a signal (default: 30)"
        parser.add_argument("--shutdown-timeout", type=float, metavar="X", default=30.0, help=text)
        DynamoRuntimeArgGroup().add_arguments(parser)
        add_engine_options(parser, OPTIONS)
        args = parser.parse_args(argv)
        config = DynamoRuntimeConfig.from_cli_args(args)
        try:
            check_number("--shutdown-timeout", args.shutdown_timeout, at_least=0)
            options = engine_arguments(args)
            check_options(options)
            engine_args = EngineArgs(**options)
            model = str(engine_args.model)
            has_no_files = model in EMBEDDED_MODELS or model.endswith(".gguf")
            if has_no_files and engine_args.tokenizer is None:
                raise ValueError(
                    f"model={model} needs tokenizer, a directory or repo id from which Dynamo's "
                    "frontend can read the tokenizer and the chat template"
                )
            config.validate()
            if (endpoint := config.endpoint) is not None:
                config.namespace, config.component, config.endpoint = parse_endpoint(endpoint)
        except ValueError as error:
            name = typed_name(args, error)
            parser.error(f"{name}: {error}" if name else str(error))
        # the frontend renders chats
        config.custom_jinja_template = config.custom_jinja_template or options.get("chat_template")
        name = args.served_model_name or model
        worker_config = WorkerConfig.from_runtime_config(config, model, served_model_name=name)
        return cls(options, name, args.shutdown_timeout), worker_config

    async def start(self, worker_id: int) -> EngineConfig:
        """Make the engine; ``worker_id`` is not used."""
        engine = self._engine = await asyncio.to_thread(Engine, **self._options)
        self._watch = asyncio.create_task(self._exit_after_failure(engine))
        info = engine.get_server_info()
        registration = LlmRegistration(
            context_length=info["context_length"],
            kv_cache_block_size=info["page_size"],
            total_kv_blocks=info["max_total_num_tokens"] // info["page_size"],
            max_num_seqs=info["max_running_requests"],
            max_num_batched_tokens=info["chunked_prefill_size"],
        )
        # the frontend reads the tokenizer and the chat template from this directory
        source = engine.args.tokenizer or engine.args.model
        return EngineConfig(str(source), self._name, llm=registration)

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks with the new tokens."""
        rid, num_sent = new_id(), 0
        request["token_ids"] = token_ids_to_list(request["token_ids"])
        self._running[rid] = context
        try:
            arguments = generate_arguments(request, self._engine.context_length)
            arguments |= logprob_arguments(request.get("output_options") or {})
            outputs = await self._engine.async_generate(**arguments, rid=rid, stream=True)
            if context.is_stopped():  # before the engine knew the request
                yield {"index": 0, "token_ids": [], "finish_reason": "cancelled"}
                return
            async for output in outputs:
                meta, result = output["meta_info"], chunk(output, num_sent)
                if meta["finish_reason"] == ABORTED and not context.is_stopped():
                    raise EngineShutdown("the worker shuts down")  # another one may continue
                if meta["finish_reason"] and "input_token_logprobs" in meta:
                    prompt_logprobs = extract_prompt_logprobs_from_sglang_meta(meta)
                    result["engine_data"] = {"prompt_logprobs": prompt_logprobs}
                yield result
                num_sent = len(output["output_ids"])
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        except QueueFullError as error:
            raise HttpError(429, str(error)) from None
        except EngineFault as error:
            raise EngineShutdown(str(error)) from None
        finally:
            del self._running[rid]

    async def abort(self, context: Any) -> None:
        """Abort the requests whose contexts were stopped; clients may give two the same id."""
        for rid, running in self._running.items():
            if running.is_stopped():
                self._engine.abort_request(rid)

    async def is_quiescent(self) -> bool:
        return not self._running

    async def cleanup(self) -> None:
        """Close the engine, if there is one, when requests have ended or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_timeout):
                while not await self.is_quiescent():
                    await asyncio.sleep(POLL_SECONDS)
        if self._watch is not None:
            self._watch.cancel()
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def kv_event_sources(self) -> list[ZmqSource]:
        sources = self._engine.kv_event_sources
        return [ZmqSource(source["endpoint"], source["topic"]) for source in sources]

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self._engine.metrics.registry)

    async def health_check_payload(self) -> dict[str, Any]:
        return build_health_check_payload(bos_token_id=0)  # type: ignore[no-any-return]

    async def _exit_after_failure(self, engine: Engine) -> None:
        """End the process after the engine has failed, so that a supervisor restarts it."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            try:
                engine.check_health()
            except EngineFault as error:
                logger.critical("the worker ends: %s", error)
                await asyncio.sleep(HEALTH_SECONDS)  # requests get their errors
                exit_now(EXIT_FAILED)


if __name__ == "__main__":
    run(Worker, sys.argv[1:])
