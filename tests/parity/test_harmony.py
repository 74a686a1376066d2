"""Messages of random conversations, read as openai_harmony reads them."""

import random
from typing import Any

import pytest

from specjax.text.harmony import ANALYSIS, FINAL, MARKS, Harmony, Message, MessageReader

pytestmark = pytest.mark.parity
oracle: Any = pytest.importorskip("openai_harmony")

PROMPT = "<|start|>assistant"
TEXTS = (
    "",
    "Hi",
    " two words\n",
    '{"x": [1, "}"]}',
    "é 漢字 🙂🙂",
    "<|end|>",
    "to=functions.g json",
)
CALLS = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather json<|message|>",
    "<|channel|>commentary to=f<|message|>",
    "<|channel|>analysis to=functions.f code<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    " to=functions.f<|channel|>analysis<|constrain|>json<|message|>",
)
OTHERS = (
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    *("<|channel|>commentary<|message|>", "<|channel|>final <|constrain|>json<|message|>"),
)


@pytest.fixture(scope="module")
def encoding() -> Any:
    return oracle.load_harmony_encoding("HarmonyGptOss")


@pytest.fixture(scope="module")
def harmony(encoding: Any) -> Harmony:
    names = (*MARKS, ANALYSIS, FINAL)
    ids = {name: encoding.encode(name, allowed_special="all")[0] for name in names}
    return Harmony(ids, encoding.decode)


def conversation(rng: random.Random, encode: Any) -> list[int]:
    """The tokens of a completion; texts that look like marks are text."""
    ids: list[int] = []
    for i in range(rng.randint(1, 5)):
        header = rng.choice(OTHERS if rng.random() < 0.7 else CALLS)
        ids += encode(f"{'<|start|>assistant' * (i > 0)}{header}", allowed_special="all")
        ids += encode("".join(rng.choices(TEXTS, k=rng.randint(0, 3))), disallowed_special=())
        ids += encode(rng.choice(("<|end|>", "<|call|>", "<|return|>")), allowed_special="all")
    return ids


def parts_of(message: Message, text: str) -> tuple[str, str, str]:
    """The channel, the recipient, and the content without a character that is not complete."""
    content = text[message.begin : message.end].rstrip("\ufffd")
    return message.channel, message.recipient, content


def known(channel: str, recipient: str | None, content: str) -> tuple[str, str, str]:
    # the oracle takes the type of a content for the recipient if there is none
    is_type = recipient is None or recipient.startswith("<|constrain|>")
    return channel, "" if is_type else str(recipient), content


@pytest.mark.parametrize("seed", range(200))
def test_every_prefix_and_every_cut_gives_the_messages(
    encoding: Any, harmony: Harmony, seed: int
) -> None:
    rng = random.Random(seed)
    ids, prompt = conversation(rng, encoding.encode), encoding.encode(PROMPT, allowed_special="all")
    parser = oracle.StreamableParser(encoding, oracle.Role.ASSISTANT)
    growing, expected, text = MessageReader(harmony, prompt), [], ""
    for end, token in enumerate(ids, 1):
        parser.process(token)
        expected = [known(x.channel, x.recipient, x.content[0].text) for x in parser.messages]
        if parser.state == oracle.StreamState.CONTENT:
            header = parser.current_channel, parser.current_recipient
            expected.append(known(*header, parser.current_content))
        text = encoding.decode(ids[:end])
        for reader in growing, MessageReader(harmony, prompt):
            messages = reader.read(text, ids[:end], is_final=rng.random() < 0.5)
            assert [parts_of(message, text) for message in messages] == expected, end
    reader, at, messages = MessageReader(harmony, prompt), 0, []
    while at < len(ids):
        at += rng.randint(1, 8)
        messages = reader.read(encoding.decode(ids[:at]), ids[:at], is_final=False)
    assert [parts_of(message, text) for message in messages] == expected
