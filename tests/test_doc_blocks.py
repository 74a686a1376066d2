"""Code blocks of the documents run, and the commands in them are accepted by their parsers.

Python blocks run with tiny models in place of the named ones, in one namespace per page. The
comment ``<!-- run by tests/... -->`` before a block names another test that runs it.
"""

import argparse
import asyncio
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml

import specjax
from specjax import DisaggregatedEngine, Engine
from specjax.cli.commands import NAMES, run_bench
from specjax.cli.main import build_parser
from specjax.cli.options import engine_arguments
from specjax.engine.args import EngineArgs
from specjax.speculative import catalog
from specjax.testing import Files, serve

from .support.model_files import write_block_draft, write_draft_model, write_modules
from .support.server_process import free_port

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
FILES += ROOT.glob("examples/*/*.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(FILES)}
FENCE = re.compile(r"(?:<!-- run by (\S+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# page, test that runs the block, language, source
BLOCKS = [(page, *found) for page, text in PAGES.items() for found in FENCE.findall(text)]
RUN_HERE = [(page, source) for page, test, kind, source in BLOCKS if kind == "python" and not test]
# these compile more than the engine that most tests share
MANY_COMPILED = ("adaptive_decoding", "algorithms", "disaggregation", "structured_output", "trees")
SAME = {  # scripts that are commands under another name
    "scripts/warmup_compile_cache.py": ["specjax", "warmup"],
    "scripts/bench_adaptive_speculative.py": ["specjax", "bench", "adaptive"],
}
PROGRAMS = "specjax|python(?= scripts/| examples/| -m specjax)|make|pip|docker|curl"
FOLDERS = ("scripts/", "examples/")
LEFT_OUT = ("...", "@FILE", "--help")
DOCKERFILE = (ROOT / "examples/deploy/Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def drafts(files: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    modules = write_modules(folder / "modules", files.target, 1)
    return {
        "EAGLE3": files.head,
        "STANDALONE": write_draft_model(folder / "model", files.target),
        "MULTI_LAYER_EAGLE": modules,
        "NEXTN": modules,
        "DSPARK": write_block_draft(folder / "dspark"),
    }


@pytest.fixture
def engines(
    files: Files, drafts: dict[str | None, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Engine]]:
    """Engines that blocks create: their options are checked, then models and sizes are tiny."""
    made: list[Engine] = []

    def replace(kind: type[Engine]) -> None:
        def make(model: str = EngineArgs.model, **options: Any) -> Engine:
            algorithm = EngineArgs(model=model, **options).speculative_algorithm
            options.pop("enable_deterministic_inference", None)  # a CPU refuses it
            if algorithm in drafts:
                options = {"speculative_num_steps": 3, **options, "draft": drafts[algorithm]}
            sizes = files.arguments(speculative=False)
            made.append(kind(sizes.pop("model"), **options | sizes))
            return made[-1]

        monkeypatch.setattr(specjax, kind.__name__, make)

    replace(Engine)
    replace(DisaggregatedEngine)
    yield made
    for engine in made:
        engine.close()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (Path(page).stem in MANY_COMPILED))
        for page in dict(RUN_HERE)
    ],
)
def test_python_blocks_run(
    page: str, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners: list[Any] = []
    start = prometheus_client.start_http_server

    def start_on_a_free_port(port: int, **options: Any) -> None:
        listeners.append(start(free_port(), **options))

    monkeypatch.setattr(prometheus_client, "start_http_server", start_on_a_free_port)
    names: dict[str, Any] = {}
    port = free_port()
    for _, source in (block for block in RUN_HERE if block[0] == page):
        exec(compile(source.replace(":8998", f":{port}"), page, "exec"), names)
    for server, thread in listeners:
        server.shutdown()
        server.server_close()
        thread.join()
    assert engines


def test_other_tests_run_the_other_blocks() -> None:
    others = {(page, test) for page, test, kind, _ in BLOCKS if kind == "python" and test}
    assert others
    for page, test in others:
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8")


def commands() -> Iterator[tuple[str, list[str]]]:
    """Page and words of each command in a block, or with options inside a paragraph."""
    for page, text in PAGES.items():
        shell = [source for _, kind, source in FENCE.findall(text) if kind in ("", "bash", "ini")]
        spans = re.findall(r"`(specjax [^`]* --[^`]*|make \w+)`", FENCE.sub("", text))
        source = "\n".join([*shell, *(span.replace("\n", " ") for span in spans)])
        source = re.sub(r"^(\$ |ExecStart=\S*/(?=specjax))", "", source, flags=re.MULTILINE)
        for name, value in re.findall(r'^(\w+)="([^"]*)"$', source, re.MULTILINE):
            source = source.replace(f"${name}", " ".join(value.split()))
        for line in source.replace("\\\n", " ").splitlines():
            if re.match(rf"(\w+=\S+ +|\")*({PROGRAMS}) ", line.strip()):
                words = shlex.split(line.partition(" < ")[0], comments=True)
                while "=" in words[0]:
                    words.pop(0)
                yield page, [word for word in words if word not in LEFT_OUT]


COMMANDS = list(commands())


def deployed() -> list[list[str]]:
    """The command of the image, those that the compose file and the documents make of it."""
    entry = re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)
    (first,) = map(json.loads, entry)
    compose = yaml.safe_load((ROOT / "examples/deploy/compose.yaml").read_text(encoding="utf-8"))
    pods = [yaml.safe_load(source) for _, _, kind, source in BLOCKS if kind == "yaml"]
    return [
        first,
        first + compose["services"]["specjax"]["command"],
        *(container["command"] for pod in pods for container in pod["spec"]["containers"]),
        *(
            first + words[words.index("specjax") + 1 :]
            for _, words in COMMANDS
            if words[:2] == ["docker", "run"]
        ),
    ]


def check_specjax(words: list[str]) -> None:
    if words[1] == "generate" and all(word.startswith("--") for word in words[2:]):
        words = [*words, "PROMPT"]
    args = build_parser().parse_args(words[1:])
    if args.run is not run_bench:
        EngineArgs(**engine_arguments(args))
        return
    module = import_module(f"bench.{NAMES[args.name]}")
    found = module.parse_arguments(args.name, args.options)
    for load in getattr(found, "load", ()):
        module.clients_of(load.replace("RATE", "1"))


class Parsed(Exception):
    """The arguments of a script were accepted."""


def check_script(path: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a script until its parser has accepted the options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(*arguments: Any) -> None:
        parse(*arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [path, *options])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / path), run_name="__main__")


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[" ".join(ws[:3]) for _, ws in COMMANDS])
def test_commands_are_accepted(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [x for x in words if x.startswith(FOLDERS) and not (ROOT / x).exists()] == []
    monkeypatch.chdir(tmp_path)
    for _, _, source in (block[1:] for block in BLOCKS if block[0] == page and block[2] == "json"):
        Path("tiers.json").write_text(source)
    monkeypatch.setenv("SPECJAX_DISAGGREGATION_SECRET", "secret")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    if page.startswith("examples/"):  # the page of a plugin
        monkeypatch.syspath_prepend((ROOT / page).parent)
        import_module(Path(page).parent.name.replace("-", "_"))
    if page == "docs/extending.md":
        monkeypatch.setattr(catalog, "custom", dict(catalog.custom))
        names = {"__name__": "lookup_of_the_page"}
        exec(next(block[3] for block in BLOCKS if block[0] == page and block[2] == "python"), names)
    match words:
        case ["python", script, *options] if script in SAME:
            check_specjax(SAME[script] + options)
        case ["specjax", *_]:
            check_specjax(words)
        case ["python", "-m", "specjax.integrations.dynamo", *options]:
            pytest.importorskip("dynamo")
            asyncio.run(import_module("specjax.integrations.dynamo").Worker.from_args(options))
        case ["python", script, *options]:
            if script == "examples/ray_serve.py":
                pytest.importorskip("ray")
            check_script(script, options, monkeypatch)
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["pip", "install", *names]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            wanted = set(re.findall(r"\w+", names[-1].partition("[")[2]))
            assert wanted <= set(project["optional-dependencies"])


@pytest.mark.parametrize("words", deployed(), ids=" ".join)
def test_deployed_commands_are_accepted(words: list[str]) -> None:
    check_specjax(words)


def test_curl_gets_answers(files: Files) -> None:
    asked = [words for _, words in COMMANDS if words[0] == "curl"]
    assert asked
    with files.engine() as engine, serve(engine, served_model_name="smollm2") as client:
        for words in asked:
            url, flag, body = words[-3:]
            assert flag == "-d"
            assert words[1:-3] in ([], ["-N"])  # without buffering
            form = "application/x-www-form-urlencoded"  # as curl says
            path = url.removeprefix("http://127.0.0.1:30000")
            answer = client.post(path, body.encode(), content_type=form)
            assert answer.status == 200, answer.body
