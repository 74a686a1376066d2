# ruff: noqa: RUF001 - look-alike characters are the point
"""Tokenizer and chat template of the embedded model compared with transformers, same file."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from specjax.checkpoints import open_target  # noqa: E402
from specjax.text.tokenizer import Tokenizer  # noqa: E402

from .torch_side import find_smollm2  # noqa: E402

pytestmark = pytest.mark.parity

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>",
    "<reponame>",
    "<file_sep>",
    "<jupyter_code>",
    "<empty_output>",
)
TEXTS = (
    "",
    " ",
    "  ",
    "\n",
    "\t\t\n \r\n",
    "The sky is blue because",
    " leading and trailing ",
    "runs   of    spaces     here",
    "two  1 three   2 four    3",
    "\n\n\n  1.\n\n   2.\r\n\t3.",
    "digits 1234567890 1,234.56 0x1F 1e-10 ²³ ½ ١٢٣ 一二三 Ⅳ",
    "it's we're I'M they'LL don't 'tis",
    "def f(x: int) -> int:\n    return x**2  # square\n\n\tif x != 0:\n\t\tprint(f'{x!r}')\n",
    "SELECT * FROM t WHERE a>=1 AND b<>'x';",
    '<html><body class="a b">&nbsp;</body></html>',
    "naïve café ångström Zürich œuvre — “quotes” … ‹›",
    "e\u0301 decomposed, \u00e9 composed, ﬁ ligature, İi̇",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया",
    "你好，世界。こんにちは世界！안녕하세요 세계",
    "🙂 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇫🇷 👍🏽",
    "\u200b\u00a0\u2003\ufeff\u202ezero width and exotic spaces\u3000",
    "\x00\x01\x1f\x7f\x80\x9f control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 \U0010ffff \ufffd",
    "a" * 300,
    "ab " * 100,
    " " * 100 + "x",
    "Ġ Ċ âĢĻ ▁",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "x<|im_end|>y <|im_end|> z<|endoftext|><repo_name>a/b<file_sep>c",
    "<|im_start|",
    "<|IM_START|> <|im_start |>",
    "<|im_start|><|im_start|>  <|im_end|>  1",
)
CONVERSATIONS = (
    [{"role": "user", "content": "What is gravity?"}],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "  Hello\n"},
    ],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 🙂 <b>{{ x }}</b> &amp; 'quotes'?"},
    ],
    [
        {"role": "system", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b<|im_end|>"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ],
    [
        {"role": "user", "content": "late"},
        {"role": "system", "content": "system turn"},
        {"role": "tool", "content": "{}"},
    ],
)

# All characters that UTF-8 can encode, with more of those that tokenizers treat differently.
pieces = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.text(" \t\n\r\u00a0\u3000", min_size=1, max_size=6),
    st.text("0123456789.,", min_size=1, max_size=6),
    st.text("abcXYZ' _-+=/(){}[]<>|", min_size=1, max_size=12),
    st.sampled_from(SPECIAL),
)
texts = st.lists(pieces, max_size=8).map("".join)


@pytest.fixture(scope="module")
def theirs() -> "transformers.PreTrainedTokenizerBase":
    path = find_smollm2()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return open_target("smollm2-135m").load_tokenizer()


def check_text(ours: Tokenizer, theirs: "transformers.PreTrainedTokenizerBase", text: str) -> None:
    for special in (True, False):
        ids = theirs(text, add_special_tokens=special)["input_ids"]
        assert ours.encode(text, add_special_tokens=special) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("text", TEXTS)
def test_text(text: str, ours: Tokenizer, theirs: "transformers.PreTrainedTokenizerBase") -> None:
    check_text(ours, theirs, text)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(text=texts)
@example(text="  1")
def test_random_text(
    text: str, ours: Tokenizer, theirs: "transformers.PreTrainedTokenizerBase"
) -> None:
    check_text(ours, theirs, text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 49151), max_size=12))
def test_random_ids_decode(
    ids: list[int], ours: Tokenizer, theirs: "transformers.PreTrainedTokenizerBase"
) -> None:
    """Any ids decode equally, also those of incomplete characters."""
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_vocabulary(ours: Tokenizer, theirs: "transformers.PreTrainedTokenizerBase") -> None:
    assert ours.vocab_size == len(theirs) == 49152
    assert [
        ours.backend.id_to_token(i) for i in range(len(theirs))
    ] == theirs.convert_ids_to_tokens(list(range(len(theirs))))
    for name, token in ours.special_tokens.items():
        assert ours.backend.token_to_id(token) == getattr(theirs, f"{name}_id")


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_template(
    messages: list[dict[str, str]],
    prompt: bool,
    ours: Tokenizer,
    theirs: "transformers.PreTrainedTokenizerBase",
) -> None:
    text = ours.apply_chat_template(messages, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    ids = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=prompt, return_dict=True
    )["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == ids
