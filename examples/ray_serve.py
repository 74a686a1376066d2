"""Run replicas of the HTTP server on Ray Serve, each with its own engine.

    pip install -e '.[serve,ray]'
    python examples/ray_serve.py --replicas 2 --context-length 512 --max-running-requests 4
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The sky is blue because"}'

With --tp-size 2, each replica gets two GPUs of one host. With --session-affinity, requests with the
same header x-session-id go to one replica, whose prefix cache has the earlier turns of a
conversation. The program has all engine options too. If SPECJAX_API_KEY is set in the environment,
clients must send this key. SIGTERM or Ctrl-C ends the program.
"""

import argparse
import os
import signal
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from specjax import Engine
from specjax.cli.options import SERVING, add_engine_options, engine_arguments
from specjax.server import make_app

SESSIONS = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
)


@serve.ingress()
class Replica:
    """The HTTP application and its engine, in one process."""

    def __init__(self, options: dict[str, Any], api_key: str | None) -> None:
        self.engine, self.api_key = Engine(**options), api_key

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self.engine, api_key=self.api_key)

    def check_health(self) -> None:
        """Raise if the engine has failed; Ray then replaces the replica."""
        self.engine.check_health()

    def __del__(self) -> None:
        """Close the engine once requests in progress have ended or timed out; called by Ray."""
        self.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], argument_default=argparse.SUPPRESS
    )
    group = parser.add_argument_group("replicas")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000)
    group.add_argument("--replicas", type=int, default=2)
    text = "GPUs per replica (default: tp_size, or 0 if the cluster has none)"
    group.add_argument("--gpus", type=float, help=text)
    group.add_argument("--requests", type=int, default=64, help="maximum per replica (default: 64)")
    group.add_argument("--shutdown-timeout", type=float, default=30.0)
    text = "send requests with the same header x-session-id to one replica"
    group.add_argument("--session-affinity", action="store_true", default=False, help=text)
    add_engine_options(parser, SERVING)
    args = parser.parse_args()
    router = {"request_router_config": SESSIONS} if args.session_affinity else {}
    ray.init(include_dashboard=False)
    gpus = getattr(args, "tp_size", 1) if ray.cluster_resources().get("GPU") else 0
    deployment = serve.deployment(
        **router,
        num_replicas=args.replicas,
        max_ongoing_requests=args.requests,
        # Ray shows them to the replica alone, as devices 0 to tp_size - 1
        ray_actor_options={"num_gpus": getattr(args, "gpus", gpus)},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=args.shutdown_timeout,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    serve.start(http_options={"host": args.host, "port": args.port})
    key = os.environ.get("SPECJAX_API_KEY")
    with suppress(KeyboardInterrupt):
        serve.run(deployment(Replica).bind(engine_arguments(args), key), blocking=True)
    serve.delete("default")  # waits for running requests while the proxy still works
    serve.shutdown()


if __name__ == "__main__":
    main()
