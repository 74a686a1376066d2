"""The examples: programs, the notebook, and the plugin, installed and run in a new process."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from specjax import SamplingParams
from specjax.engine.args import EngineArgs
from specjax.testing import Files

EXAMPLES = Path(__file__).parents[1] / "examples"
EXAMPLE = EXAMPLES / "specjax-markov"
PROMPTS = [[7, 9, 11], [30, 2, 8, 41], [7, 9, 11]]
SIZES = {"page_size": 4, "max_running_requests": 1, "chunked_prefill_size": 16}
QUESTIONS = [
    {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 5} | how,
    }
    for how in ({"temperature": 0.0}, {"temperature": 0.8})
    for prompt in PROMPTS
]
ADAPTIVE = {
    "speculative_algorithm": "markov",
    "overlap": True,
    "speculative_adaptive": True,
    "speculative_num_steps": 3,
    "speculative_adaptive_config": {"candidate_steps": [1, 3]},
}
SERVE = """
import json, sys
from specjax import Engine
arguments, questions = json.load(sys.stdin)
with Engine(**arguments) as engine:
    outs = [engine.generate(**question) for question in questions]
names = ("spec_num_correct_drafts", "spec_num_proposed_drafts")
drafts = [[out["meta_info"][name] for name in names] for out in outs]
print(json.dumps([[out["output_ids"] for out in outs], drafts]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package as pip installs it."""
    folder = tmp_path_factory.mktemp("example")
    # a copy, as setuptools writes files next to the sources
    source = shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = folder.glob("specjax_markov-*.whl")
    target = [*pip, "install", "--quiet", "--no-deps", "--target", folder / "site", wheel]
    subprocess.run(target, check=True, timeout=600)
    return folder / "site"


def serve(site: Path, files: Files, cache: Path) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Start an engine in a new process; return tokens, and accepted and proposed drafts."""
    arguments = SIZES | ADAPTIVE | {"model": str(files.target), "compile_cache_dir": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        input=json.dumps([arguments, QUESTIONS]),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    tokens, drafts = json.loads(done.stdout)
    return tokens, drafts


@pytest.mark.long_after(1)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_one_file_program_equals_the_engine(files: Files, temperature: float) -> None:
    generate = runpy.run_path(str(EXAMPLES / "minimal.py"))["generate"]
    prompts = ["abcabcab", "the quick brown fox jumps over the lazy dog"]
    given = {"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True}
    params = SamplingParams(**given, sampling_seed=5)
    _, texts = generate(EngineArgs(**files.arguments()), prompts, params)
    with files.engine(speculative=False) as plain:
        expected = [out["output_ids"] for out in plain.generate(prompts, params)]
    assert [[token for token, _ in text] for text in texts] == expected
    assert any(is_draft for text in texts for _, is_draft in text)


@pytest.mark.slow
def test_plugin_is_installed_named_and_recompiled_after_an_edit(
    files: Files, site: Path, tmp_path: Path
) -> None:
    with files.small(speculative=False, chunked_prefill_size=16) as plain:
        expected: Any = [plain.generate(**question)["output_ids"] for question in QUESTIONS]
    cache = tmp_path / "cache"
    tokens, drafts = serve(site, files, cache)
    assert tokens == expected
    for again in (2, 5):  # repeat the first prompt
        accepted, proposed = drafts[again]
        assert 0 < accepted <= proposed
        assert accepted >= 8
    kept = set(cache.glob("specjax-executables/*.xla"))
    assert kept

    module = site / "specjax_markov" / "__init__.py"
    source = module.read_text()
    edited = source.replace("rows, rows > 0", "rows, rows < 0")
    assert edited != source
    module.write_text(edited)
    tokens, drafts = serve(site, files, cache)
    assert tokens == expected
    assert not any(map(any, drafts))
    compiled = set(cache.glob("specjax-executables/*.xla"))
    assert len(compiled) == 2 * len(kept)
    module.write_text(source)
    assert serve(site, files, cache)[1][2][0] > 0
    assert set(cache.glob("specjax-executables/*.xla")) == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "typed", "shown"),
    [
        ("quickstart", "", "equal to plain decoding: True"),
        pytest.param(
            "streaming_chat", "Hi!\n/new\nHello\n", "accept length", marks=pytest.mark.long
        ),
        pytest.param(
            "log_probabilities", "", "'The capital of France is': ", marks=pytest.mark.long
        ),
        pytest.param("adaptive_decoding", "", '"policy": "budget"', marks=pytest.mark.long),
        ("weight_updates", "", "the first weights give the first text: True"),
    ],
)
def test_a_script_runs(name: str, typed: str, shown: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


@pytest.mark.slow
def test_the_notebook_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = EXAMPLES / "tour.ipynb"
    assert notebook.stat().st_size < 300_000
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    saved = [output for cell in code for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in saved) == 2
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda: None)
    names: dict[str, Any] = {}
    for cell in code:
        exec("".join(cell["source"]), names)
    assert capsys.readouterr().out.count("equal to plain decoding: True") == 2
    bars, tree = map(plt.figure, plt.get_fignums())
    heights = [bar.get_height() for bar in bars.axes[0].patches]
    assert sum(heights) == names["meta"]["spec_num_correct_drafts"] > 0
    assert len(tree.axes[0].texts) == len(names["tokens"]) == len(names["places"])
    plt.close("all")
