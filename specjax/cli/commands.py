"""``specjax serve``, ``warmup``, ``bench``, ``inspect`` and ``env``.

JAX is imported only where a command runs, so that one that only refuses an option is quick.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from specjax.checks import check_integer, check_number
from specjax.cli import options
from specjax.engine.args import EngineArgs
from specjax.engine.names import BENCHMARKS
from specjax.logs import LEVELS, LOAD_SECONDS

API_KEY, ADMIN_API_KEY = "SPECJAX_API_KEY", "SPECJAX_ADMIN_API_KEY"
SECONDS_PER_DAY = 86400.0
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# benchmark -> its module in scripts/bench
NAMES = {"acceptance": "acceptance", "adaptive": "compare"}
NAMES |= {"attention": "kernels", "experts": "kernels"}
NAMES |= {name: name for name in ("compare", "kernels", "round", "serving")}


def add_serve_parser(commands: Any) -> None:
    parser = options.add_command(
        commands,
        "serve",
        run_serve,
        "serve a model over HTTP",
        "Serve a model over HTTP with OpenAI's and SGLang's routes. When the server is ready, it "
        "prints its address to standard output.",
    )
    options.add_model(parser)
    group = parser.add_argument_group("server")
    for flag, kind, default, text in (
        ("--host", str, "127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces"),
        ("--port", int, 30000, "port to listen on; 0 picks a free port"),
        ("--served-model-name", str, None, "model name for clients (default: value of --model)"),
        ("--api-key", str, None, f"key that clients must send; safer to set {API_KEY}"),
        (
            "--api-key-file",
            Path,
            None,
            "file with further keys of clients, one per line, which is read again on SIGHUP",
        ),
        (
            "--admin-api-key",
            str,
            None,
            "key for abort_all, /flush_cache and /update_weights_from_disk; safer to set "
            f"{ADMIN_API_KEY} (default: the API key)",
        ),
        (
            "--max-requests",
            int,
            None,
            "maximum completions that the HTTP server runs or queues; further ones are refused "
            "(default: 4096)",
        ),
        (
            "--default-max-tokens",
            int,
            None,
            "maximum completion tokens of requests that set none (default: 16 in /v1/completions, "
            "128 in /generate, and the rest of the context in chats)",
        ),
        ("--max-body-bytes", int, None, "maximum bytes of a request body (default: 33554432)"),
        ("--shutdown-timeout", float, 30.0, "seconds for requests to finish after a signal"),
    ):
        suffix = "" if default is None else f" (default: {default})"
        metavar = {int: "N", float: "X", str: "TEXT", Path: "FILE"}[kind]
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + suffix)
    group.add_argument(
        "--cors-allow-origin",
        action="append",
        metavar="ORIGIN",
        default=[],
        help="allow browser pages from this origin to call the server; * allows all; repeatable",
    )
    group.add_argument(
        "--allowed-hosts",
        type=lambda text: text.split(","),
        metavar="NAME,NAME",
        default=[],
        help="Host header names to accept in addition to loopback names (of a proxy, say); checked "
        "only if the server listens on a loopback address without an API key",
    )
    group.add_argument(
        "--log-level",
        choices=LEVELS,
        help='minimum level of log lines (default: info; with --quiet: warning). "info" logs one '
        f"line every {LOAD_SECONDS:g} s under load",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="format of log lines on standard error (default: text)",
    )
    switches = {
        "--access-log": "log one line per answered request: client, method, path, status and time; "
        'those of /, /health, /ping and /metrics have level "debug"',
        "--quiet": "hide progress",
        "--stay-after-failure": "keep the process, which answers 503, after the engine has failed "
        "(default: it exits with status 1 after 10 s)",
    }
    options.add_switches(group, switches)
    options.add_engine_options(parser, options.SERVING)


def run_serve(
    args: argparse.Namespace, engine_args: dict[str, Any], make_engine: Callable[..., Any]
) -> int:
    check_integer("--port", args.port, 0, 65535)
    check_number("--shutdown-timeout", args.shutdown_timeout, at_least=0)
    from specjax.server.keys import KeyFile
    from specjax.server.process import serve  # needs an optional dependency
    from specjax.server.service import Access, is_loopback

    names = ("max_requests", "max_body_bytes", "default_max_tokens")
    limits = {name: getattr(args, name) for name in names}
    serve(
        lambda: make_engine(**engine_args),
        host=args.host,
        port=args.port,
        shutdown_timeout=args.shutdown_timeout,
        stays_after_failure=args.stay_after_failure,
        name=args.served_model_name,
        access=Access(
            # keys may come from the environment, because other users can read the command line
            api_key=or_environment(args.api_key, API_KEY),
            key_file=args.api_key_file and KeyFile(args.api_key_file),
            admin_api_key=or_environment(args.admin_api_key, ADMIN_API_KEY),
            is_private=is_loopback(args.host),
            allowed_hosts=args.allowed_hosts,
            origins=args.cors_allow_origin,
        ),
        **{name: value for name, value in limits.items() if value is not None},
    )
    return 0


def or_environment(value: str | None, name: str) -> str | None:
    return os.environ.get(name) if value is None else value


def add_warmup_parser(commands: Any) -> None:
    parser = options.add_command(
        commands,
        "warmup",
        run_warmup,
        "compile before the first start",
        "Compile all functions of an engine with these options into the compilation cache, without "
        "loading weights. Existing entries are kept.",
    )
    options.add_model(parser)
    options.add_engine_options(parser, options.SERVING)
    group = parser.add_argument_group("warm-up")
    options.add_start_options(group, ())
    options.add_switches(group, {"--quiet": "hide progress and the table"})
    for flag, kind, metavar, text in (
        ("--prune", float, "DAYS", "delete cache entries not read for this many days"),
        ("--json", Path, "FILE", "write the results to this file"),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, default=None, help=text)


def run_warmup(args: argparse.Namespace, engine_args: dict[str, Any], _: object) -> int:
    """Run the command; returns 1 if a function could not be written to the cache, else 0."""
    from specjax.compiling.cache import open_compile_cache
    from specjax.engine.warmup import warm_up

    with tempfile.TemporaryDirectory() as folder:
        parsed = EngineArgs(**options.with_preset(engine_args, args.preset, Path(folder)))
        result = warm_up(parsed)
    if args.prune is not None and (cache := open_compile_cache(parsed.compile_cache_dir)):
        count = cache.prune(args.prune * SECONDS_PER_DAY)
        print(f"deleted {count} old cache entries", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_dict(), indent=1) + "\n")
    if not args.quiet:
        print(result.table())
    return 0 if result.is_complete else 1


def add_bench_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="run a benchmark from scripts/bench",
        description="Run a benchmark from scripts/bench. This needs a clone of the repository. "
        "'specjax bench NAME --help' lists the options of a benchmark.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "name",
        type=_benchmark,
        choices=NAMES,
        metavar="NAME",
        help="acceptance (accept length by kind of prompt), adaptive and compare (decoding "
        "methods), attention, experts and kernels (Pallas), round (one round), or serving "
        "(throughput and latency under load)",
    )
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of NAME")
    parser.set_defaults(run=run_bench, quiet=True)


def _benchmark(name: str) -> str:
    if name in BENCHMARKS:
        text = f"{name} is not a benchmark here; use specjax bench {BENCHMARKS[name]}"
        raise argparse.ArgumentTypeError(text)
    return name


def run_bench(args: argparse.Namespace, *_: Any) -> int:
    """Run a benchmark; return 1 if float32 texts differ or requests failed, else 0."""
    if not (SCRIPTS / "bench").is_dir():
        raise ValueError(
            f"specjax bench: {SCRIPTS / 'bench'} does not exist; benchmarks are not part of an "
            "installed wheel; in a clone, run: pip install -e ."
        )
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return int(import_module(f"bench.{NAMES[args.name]}").main(args.name, args.options))


def add_inspect_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="describe a draft or a model, and check whether a draft fits a target",
        description="Print format, algorithm, target layers, vocabulary and memory of a draft. "
        "Only the configuration and the headers of its tensors are read, also of a repository, "
        "unless that has PyTorch files, which are downloaded. The exit status is 1 if "
        "the draft is not supported or does not fit the target.",
        allow_abbrev=False,
    )
    text = "directory, GGUF file or repository of the draft; without --model, also of a target"
    parser.add_argument("checkpoint", metavar="DRAFT", help=text)
    text = "target to check: embedded name, directory, GGUF file or repository"
    parser.add_argument("--model", dest="target", metavar="TARGET", help=text)
    run = lambda *inputs: import_module("specjax.cli.inspect").run_inspect(*inputs)  # noqa: E731
    parser.set_defaults(run=run, quiet=True)


PACKAGES = "specjax jax jaxlib flax numpy jax-cuda12-plugin jax-cuda13-plugin".split()
PREFIXES = ("JAX_", "XLA_", "SPECJAX_", "CUDA_VISIBLE_DEVICES")


def add_env_parser(commands: Any) -> None:
    text = "print versions, devices and settings for a bug report"
    parser = commands.add_parser("env", help=text, description=f"{text.capitalize()}.")
    parser.set_defaults(run=run_env, quiet=True)


def run_env(*_: Any) -> int:
    """Print one property per line, without the values of secrets."""
    import jax

    from specjax.compiling.cache import open_compile_cache
    from specjax.models.placement import driver_version, newest_cuda, package_version, unused_gpu
    from specjax.runtime.runner_config import device_memory

    print(f"Python: {platform.python_version()}")
    print(f"OS: {platform.platform()}, {os.cpu_count()} CPUs")
    for name in PACKAGES:
        if version := package_version(name):
            print(f"{name}: {version}")
    if driver := driver_version():
        print(f"NVIDIA driver: {driver}, for CUDA up to {newest_cuda(driver) or 'version 11'}")
    has_gpu = False
    try:
        for device in jax.devices():
            has_gpu |= device.platform == "gpu"
            memory = device_memory(device) / 1e9
            print(f"device {device.id}: {device.device_kind}, {memory:.2f} GB")
        if cache := open_compile_cache("auto"):
            sizes = [path.stat().st_size for path in cache.path.iterdir()]
            print(f"compile cache: {cache.path}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB")
    except (RuntimeError, AssertionError) as error:  # the plugin is absent or fails
        print("devices: none:", " ".join(repr(error).split()))
    if not has_gpu and (reason := unused_gpu()):
        print(f"GPU: {reason}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(PREFIXES):
            print(f"{name}: {'(set)' if name.endswith(('KEY', 'SECRET')) else value}")
    return 0
