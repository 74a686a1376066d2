"""A server process with the embedded model, an engine for comparison, and client programs.

The clients are installed in their own virtual environment, which ``.ci/run`` creates.
``CLIENTS_PYTHON`` can name another interpreter. Without an environment, the tests are skipped.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specjax import Engine
from specjax.testing import Client

from ..support.server_process import serving, wait_until_ready

HERE = Path(__file__).parent
PYTHON = os.environ.get("CLIENTS_PYTHON") or HERE.parents[1] / ".ci/cache/clients/bin/python"
KEY = "secret"
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 256,
    "max_running_requests": 2,
    "batch_buckets": (2,),
    "chunked_prefill_size": 32,
}
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1",
}
MODEL = "smollm2"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The capital of France is"
SAMPLING = {"max_new_tokens": 8, "temperature": 0.8, "sampling_seed": 7}
Run = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Function that runs a program with arguments and returns the JSON that it prints."""
    if not Path(PYTHON).is_file():
        pytest.skip("needs the clients' virtual environment, which .ci/run creates")
    home = {"HF_HOME": str(tmp_path_factory.mktemp("hub"))}

    def run(name: str, **arguments: Any) -> Any:
        program = HERE / "programs" / f"{name}.py"
        command = [str(PYTHON), str(program), json.dumps(arguments)]
        ended = subprocess.run(
            command, env=os.environ | OFFLINE | home, capture_output=True, text=True, timeout=600
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def server(run_program: Run, files: Any) -> Iterator[Client]:
    """Client of a server process that speculates and requires an API key."""
    arguments = SIZES | {"model": "smollm2-135m", "speculative_num_steps": 3}
    arguments |= {"grammar_backend": "llguidance", "tool_call_parser": "hermes"}
    arguments["compile_cache_dir"] = files.cache
    with serving(arguments, "--served-model-name", MODEL, key=KEY) as (process, client):
        wait_until_ready(process, client)
        yield client


@pytest.fixture(scope="session")
def given(server: Client) -> dict[str, Any]:
    """Arguments that all programs get."""
    return {"address": f"http://127.0.0.1:{server.port}", "key": KEY, "model": MODEL}


@pytest.fixture(scope="session")
def engine(run_program: Run, files: Any) -> Iterator[Engine]:
    """Engine with the same model in this process, without speculation."""
    with Engine("smollm2-135m", compile_cache_dir=files.cache, **SIZES) as made:
        yield made
