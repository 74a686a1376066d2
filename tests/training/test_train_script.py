"""The training script from a model directory to a head that opens, with no data set."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from specjax.checkpoints import open_target
from specjax.checkpoints.draft import open_draft

from ..loading import load_script

SIZES = "--generator-rows 8 --prefill-rows 4 --max-prompt-len 160 --max-answer-tokens 12"
TRAIN = "--steps 6 --ttt-steps 2 --batch-rows 2 --row-length 64 --draft-vocab-size 64"


@pytest.fixture(scope="module")
def main():
    module = load_script("train_draft")

    def run(arguments: str) -> int:
        # optax promotes its step count implicitly
        with jax.numpy_dtype_promotion("standard"):
            return module.main(arguments.split())

    return run


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<e>"])
    backend.save(str(path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}bot:"
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<e>", "chat_template": template})
    )
    hidden, inner, layers, vocab = 16, 24, 4, 257
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "eos_token_id": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens": (vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (vocab, hidden),
    }
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj": (hidden, hidden),
            f"model.layers.{i}.self_attn.k_proj": (hidden // 2, hidden),
            f"model.layers.{i}.self_attn.v_proj": (hidden // 2, hidden),
            f"model.layers.{i}.self_attn.o_proj": (hidden, hidden),
            f"model.layers.{i}.mlp.gate_proj": (inner, hidden),
            f"model.layers.{i}.mlp.up_proj": (inner, hidden),
            f"model.layers.{i}.mlp.down_proj": (hidden, inner),
            f"model.layers.{i}.input_layernorm": (hidden,),
            f"model.layers.{i}.post_attention_layernorm": (hidden,),
        }
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": rng.normal(size=shape, scale=0.4).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.slow
def test_from_no_data_to_a_draft(main, model_directory, tmp_path, capsys):
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text('{"category": "math", "turns": ["1 + 1?"]}\n')
    data, head, report = tmp_path / "data.npz", tmp_path / "head", tmp_path / "report.json"
    common = f"--model {model_directory} --data {data} {SIZES}"
    collecting = f"--self-sample 24 --prompts {prompts} --max-user-tokens 8 --generate-only"
    assert main(f"{common} {collecting} --report {report}") == 0
    assert json.loads(report.read_text())["data"]["math"]["sequences"] == 2
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
    # another draft vocabulary, of the same size or not, does not go on with this run
    capsys.readouterr()
    assert main(f"{train} --draft-vocab-size 60") == 2
    assert "another draft vocabulary" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--generate-only", "--generate-only needs --data"),
        ("--self-sample 3", "--output is needed"),
        ("--output {free}", "nothing to train on: give prompt files (--prompts)"),
        ("--output {file}", "--output {file}: {file} is no directory to write to"),
        ("--output {file}/head", "--output {file}/head: {file} is no directory to write to"),
        ("--output {free} --checkpoint-dir {file}", "--checkpoint-dir {file}: {file} is no"),
        ("--output {free} --report {file}/report", "--report {file}/report: {file} is no"),
        ("--generate-only --data {free}", "--data {free} is a directory"),
        ("--output {free} --log-every 0", "--log-every=0 must be an integer of at least 1"),
        ("--output {free} --checkpoint-every 0", "--checkpoint-every=0"),
        ("--output {free} --stop-at 0", "--stop-at=0 must be an integer of at least 1"),
        ("--output {free} --held-out 1.0", "--held-out=1.0 must be a finite number"),
        ("--output {free} --hard-weight nan", "--hard-weight=nan"),
        ("--output {free} --prompts {file}", "file, line 1: "),
    ],
)
def test_bad_arguments_are_named_before_anything_is_loaded(
    main, tmp_path, capsys, arguments, message
):
    file = tmp_path / "file"
    file.write_text("text")
    names = {"free": tmp_path, "file": file}
    more = "" if "nothing" in message or "--prompts" in arguments else " --self-sample 3"
    arguments = "--model no-such-model " + arguments.format(**names) + more
    assert main(arguments) == 2
    assert message.format(**names) in capsys.readouterr().err
