"""The training script: from a model directory to a loadable head, without a data set."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoints import open_target
from specjax.checkpoints.block import open_block
from specjax.checkpoints.draft import open_draft
from specjax.testing import letter_tokenizer
from specjax.testing.files import CONFIG
from specjax.training import run
from specjax.training.data import Corpus

from ..support.model_files import write_block_draft, write_model
from ..support.quantized_files import quantised
from ..support.scripts import load_script

SIZES = "--generator-rows 8 --prefill-rows 4 --max-prompt-len 160 --max-answer-tokens 12"
TRAIN = "--steps 6 --ttt-steps 2 --batch-rows 2 --row-length 64 --draft-vocab-size 64"


@pytest.fixture(scope="module")
def main():
    script = load_script("train_draft")

    def call(arguments: str) -> int:
        # optax promotes its step count implicitly
        with jax.numpy_dtype_promotion("standard"):
            return script.main(arguments.split())

    return call


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    config = dataclasses.replace(CONFIG, num_layers=4, max_position_embeddings=512)
    return write_model(tmp_path_factory.mktemp("model"), config, tokenizer=letter_tokenizer())


@pytest.mark.slow
def test_training_without_data(main, model_directory, tmp_path, capsys):
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"category": "math", "turns": ["1 + 1?"]}\n')
    data, head, report = tmp_path / "data.npz", tmp_path / "head", tmp_path / "report.json"
    common = f"--model {model_directory} --data {data} {SIZES}"
    collecting = f"--self-sample 24 --prompts {prompts} --max-user-tokens 8 --generate-only"
    assert main(f"{common} {collecting} --report {report}") == 0
    assert json.loads(report.read_text())["data"]["math"]["sequences"] == 2
    assert "\r" not in capsys.readouterr().err  # only terminals get a progress bar
    saved = data.read_bytes()
    train = f"{common} {TRAIN} --output {head} --checkpoint-dir {tmp_path / 'run'} --held-out 0.2"
    assert main(f"{train} --stop-at 3") == 0
    first = (head / "model.safetensors").read_bytes()
    assert main(f"{train} --report {report}") == 0
    assert data.read_bytes() == saved
    assert (head / "model.safetensors").read_bytes() != first
    figures = json.loads(report.read_text())
    assert figures["steps"] == 6
    assert len(figures["held_out_acceptance"]) == 2
    assert 1.0 <= figures["predicted_accept_length"] <= 3.0
    draft = open_draft(head, open_target(model_directory))
    assert draft.config.draft_vocab_size == 64
    assert set(draft.load_weights())
    more = f"--initial {head} --steps 1 --learning-rate 1e-9 --output {tmp_path / 'again'}"
    assert main(f"{common} {TRAIN} {more}") == 0
    again = open_draft(tmp_path / "again", open_target(model_directory))
    assert again.config == draft.config
    np.testing.assert_array_equal(again.load_weights()["d2t"], draft.load_weights()["d2t"])
    # this run cannot be resumed with another draft vocabulary, even one of the same size
    capsys.readouterr()
    assert main(f"{train} --draft-vocab-size 60") == 2
    assert "its draft vocabulary differs" in capsys.readouterr().err


@pytest.fixture
def generated(monkeypatch) -> list[str]:
    """List the prompts of each generation; a stub returns 24 short sequences instead."""
    calls: list[str] = []

    def collect(sampler, tokenizer, config, entries, progress):
        calls.append(str(entries))
        return Corpus.of([([i, 1], [2, 3, 4], "text") for i in range(24)])

    monkeypatch.setattr(run, "collect", collect)
    return calls


@pytest.mark.slow
def test_generated_text_survives_a_later_failure(
    main, model_directory, tmp_path, capsys, generated
):
    """Only the same prompts, options and weights find the generated text again."""
    prompts, model = tmp_path / "questions.jsonl", tmp_path / "model"
    shutil.copytree(model_directory, model)
    prompts.write_text('{"turns": ["1 + 1?"]}\n')
    options = (
        f"--output {tmp_path / 'head'} --model {model} --prompts {prompts} --self-sample 24 {SIZES}"
    )

    def fails(batch_rows: int, more: str = "") -> int:
        """Check that the run fails, and return the number of generations so far."""
        assert main(f"{options} --row-length 64 --batch-rows {batch_rows} {more}") == 2
        message = f"--batch-rows={batch_rows} exceeds the 2 packed rows of the training data"
        assert message in capsys.readouterr().err
        assert len(list((tmp_path / "head").glob("data-*.npz"))) == len(generated)
        return len(generated)

    assert [fails(20), fails(19)] == [1, 1]
    assert [fails(20, "--seed 1"), fails(20)] == [2, 2]
    prompts.write_text('{"turns": ["1 + 2?"]}\n')
    assert [fails(20), fails(20)] == [3, 3]
    os.utime(model / "config.json", (1, 1))
    assert [fails(20), fails(20)] == [4, 4]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH"])
def test_block_drafters_are_trained(main, model_directory, tmp_path, generated, algorithm):
    head, report = tmp_path / "head", tmp_path / "report.json"
    options = f"--model {model_directory} --output {head} --self-sample 24 {SIZES} {TRAIN}"
    block = f"--algorithm {algorithm} --draft-layers 2 --num-drafts 3 --markov-rank 4 --anchors 8"
    block += " --batch-rows 1"
    assert main(f"{options} {block} --join 0.5 --held-out 0.5 --report {report}") == 0
    assert len(json.loads(report.read_text())["held_out_acceptance"]) == 3
    draft = open_block(head, open_target(model_directory))
    assert draft.config.num_drafts == 3
    assert draft.config.anchor_first == bool(draft.config.markov_rank) == (algorithm == "DSPARK")
    first = draft.load_weights()
    again = tmp_path / "again"
    more = f"--initial {head} --steps 1 --warmup-steps 0 --learning-rate 1e-9 --output {again}"
    assert main(f"{options} {block} {more}") == 0
    for name, value in open_block(again, open_target(model_directory)).load_weights().items():
        np.testing.assert_allclose(value, first[name], rtol=1e-5, atol=1e-7)


def test_target_and_options_are_checked_before_generation(
    main, model_directory, tmp_path, capsys, generated
):
    config = json.loads((model_directory / "config.json").read_text())
    drafters = {
        "dspark": write_block_draft(tmp_path / "dspark"),
        "sliding": write_block_draft(tmp_path / "sliding", windows=(4, 0), causal=(True, False)),
    }
    plain = "lm_head markov confidence_head embed_tokens"
    folder = tmp_path / "quantised"
    drafters["fp8"], _ = quantised(drafters["dspark"], folder, "fp8-channel", plain)
    for change, arguments, message in (
        ({"num_hidden_layers": 3}, "", "--model has 3 layers; EAGLE-3 needs 4 or more"),
        (
            {"num_hidden_layers": 2},
            "--algorithm DSPARK",
            "--model has 2 layers; block drafters need 3 or more",
        ),
        (
            {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
            "",
            "training does not support recurrent layers",
        ),
        (
            {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "layer_types": None},
            "",
            "training does not support short convolutions",
        ),
        ({}, "--algorithm DFLASH --initial {dspark}", "is not for --algorithm DFLASH"),
        ({}, "--algorithm DSPARK --initial {sliding}", "sliding windows, causal layers, biases"),
        ({}, "--algorithm DSPARK --initial {fp8}", "or quantised matrices cannot be trained"),
        (
            {},
            "--join 0.5 --row-length 513",
            "--row-length=513 exceeds the model's context of 512 tokens, and --join",
        ),
        ({}, "--batch-rows 25", "--batch-rows=25 exceeds the 24 answers to generate"),
        (
            {},
            "--max-prompt-len 501",
            "--max-prompt-len=501 plus 12 tokens (the larger of --max-answer-tokens and "
            "--max-user-tokens) exceeds the model's context of 512 tokens",
        ),
        ({}, "--data {data}", "data.npz was generated for another model: it contains token 300"),
    ):
        model, data = tmp_path / "model", tmp_path / "data.npz"
        shutil.copytree(model_directory, model, dirs_exist_ok=True)
        (model / "config.json").write_text(json.dumps(config | change))
        Corpus.of([([300], [1, 2], "text")]).save(data)
        options = f"--model {model} --output {tmp_path / 'head'} --self-sample 24 {SIZES}"
        names = {"data": data, **drafters}
        assert main(f"{options} --max-user-tokens 8 {arguments.format(**names)}") == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert not generated


def test_help_states_the_default_of_every_option(main, capsys):
    with pytest.raises(SystemExit):
        main("--help")
    text = capsys.readouterr().out
    options = re.split(r"\n  (?=-)", text.split("\noptions:")[1])[2:]
    assert len(options) > 25
    for entry in options:
        words = " ".join(entry.split())
        assert "default" in words, words
        assert "None" not in words, words
    assert "(default: 224)" in text
    assert "(default: 512)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--generate-only", "--generate-only needs --data"),
        ("--self-sample 3", "--output is required"),
        ("--output {free}", "nothing to train on: pass prompt files (--prompts)"),
        ("--output {file}", "--output {file}: {file} is not a writable directory"),
        ("--output {file}/head", "--output {file}/head: {file} is not a writable directory"),
        ("--output {free} --checkpoint-dir {file}", "--checkpoint-dir {file}: {file} is not a"),
        ("--output {free} --report {file}/report", "--report {file}/report: {file} is not a"),
        ("--generate-only --data {free}", "--data {free} is a directory"),
        ("--output {free} --log-every 0", "--log-every=0 must be an integer of at least 1"),
        ("--output {free} --checkpoint-every 0", "--checkpoint-every=0"),
        ("--output {free} --stop-at 0", "--stop-at=0 must be an integer of at least 1"),
        ("--output {free} --held-out 1.0", "--held-out=1.0 must be"),
        ("--output {free} --hard-weight nan", "--hard-weight=nan"),
        ("--output {free} --prompts {file}", "file, line 1: "),
    ],
)
def test_bad_arguments_are_named_before_loading(main, tmp_path, capsys, arguments, message):
    file = tmp_path / "file"
    file.write_text("text")
    names = {"free": tmp_path, "file": file}
    more = "" if "nothing" in message or "--prompts" in arguments else " --self-sample 3"
    arguments = "--model no-such-model " + arguments.format(**names) + more
    assert main(arguments) == 2
    assert message.format(**names) in capsys.readouterr().err
