"""Harmony, the format in which gpt-oss writes: messages with headers between tokens that are marks.

``<|start|>HEADER<|message|>CONTENT<|end|>``; a prompt ends with ``<|start|>assistant``, within a
header. Content of the channel ``analysis`` is reasoning. A header with ``to=functions.NAME``,
before or after the channel, begins a call, whose content is its arguments. All else is content.

Text that only looks like a mark is text. So tokens say where messages are, and their text is cut
out of the text of the completion.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

from specjax.checks import refused
from specjax.text.tokenizer import Tokenizer

NAME = "gpt-oss"
START, MESSAGE, CHANNEL, CONSTRAIN = "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>"
END, RETURN, CALL = ENDS = "<|end|>", "<|return|>", "<|call|>"
MARKS = (START, MESSAGE, CHANNEL, CONSTRAIN, *ENDS)
ANALYSIS, FINAL = "analysis", "final"
# of a grammar: reasoning before another message, and the type of the content in a header
RULES = f"""analysis: {CHANNEL} "{ANALYSIS}" {MESSAGE} TEXT {END} {START} "assistant"
kind: " json" | " "? {CONSTRAIN} "json"
TEXT: /(?s:.*)/
"""
# tokens of a header without its end, after which it is content
MAX_HEADER = 128
# messages of a completion; what follows them is content, because the time per token grows with them
MAX_MESSAGES = 128
_MARK = re.compile("|".join(map(re.escape, MARKS)))
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_WORDS = ("assistant", ANALYSIS, "commentary", FINAL, "json", "code", "to=")
# other words for the three efforts that the model knows
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class Message(NamedTuple):
    """A message. Places are numbers of characters of the text, or of tokens."""

    header: str  # with the marks within it; empty if it has none
    start: int  # of the header
    begin: int  # of the content
    first_token: int  # of the header
    content_token: int  # of the content
    end: int | None = None  # of the content; ``None`` if it may go on
    stop: int | None = None  # after the mark that ends the message
    stop_token: int | None = None

    @property
    def channel(self) -> str:
        words = _MARK.sub(" ", self.header.partition(CHANNEL)[2]).split()
        return words[0] if words else ""

    @property
    def is_reasoning(self) -> bool:
        return self.channel == ANALYSIS

    @property
    def recipient(self) -> str:
        to = _RECIPIENT.search(_MARK.sub(" ", self.header))
        return to[1] if to else ""

    def function(self, names: Collection[str]) -> str:
        """The name of the function that is called, if it is one of ``names``."""
        # models leave out the first word
        name = self.recipient.removeprefix("functions.")
        return name if name in names else ""


@dataclass(frozen=True)
class Harmony:
    """The format with a tokenizer's ids of its marks and channels; ``decode`` shows the marks."""

    ids: Mapping[str, int]
    decode: Callable[[list[int]], str]

    is_special: ClassVar = True  # whether texts without special tokens lack the marks
    opening: ClassVar = CHANNEL + FINAL + MESSAGE  # what an answer without reasoning begins with

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Harmony":
        """Raises ValueError if a mark or a channel is not a token."""
        token_id, names = tokenizer.backend.token_to_id, {*MARKS, ANALYSIS, FINAL}
        ids = {name: token for name in names if (token := token_id(name)) is not None}
        if missing := names - ids.keys():
            raise ValueError(f"reasoning_parser={NAME!r} needs tokens for {sorted(missing)}")
        return cls(ids, partial(tokenizer.decode_generated, skip_special_tokens=False))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        return frozenset((self.ids[RETURN], self.ids[CALL]))

    def header(self, prompt: Sequence[int]) -> Sequence[int] | None:
        """The tokens of the prompt after its last start of a message."""
        start = self.ids[START]
        at = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] == start), None)
        return None if at is None else prompt[at + 1 :]

    def parts(self, prompt: Sequence[int], continued: str) -> dict[str, Any]:
        """Return the fields with which ``TextParts`` reads completions of a prompt."""
        return {"may_reason": True, "new_reader": MessageReader(self, prompt).copy}

    def boundary(
        self, prompt: Sequence[int], grammar: str, budget: int | None, *, is_list: bool
    ) -> dict[str, Any] | None:
        """Where the grammar of a completion begins, as the fields of ``sampling.Boundary``.

        That is the content of the channel ``final``. ``None`` if the grammar begins at once: the
        prompt has no messages, or the grammar has their marks.
        """
        header, ids = self.header(prompt), self.ids
        if header is None:
            return None
        if MESSAGE in grammar:
            if budget is not None:
                demand = "must be None with a forced call, whose grammar includes the reasoning"
                raise refused("thinking_token_budget", budget, demand)
            return None
        # before the channel, at its name, in the headers of each kind, and in contents
        top, channel, other, final, analysis, inside, shown = states = range(7)
        others = top, other, other, final, analysis, inside, shown
        edges = {(state, ids[mark]): top for state in states for mark in ENDS}
        for state, content in zip(states, (shown, shown, shown, -1, inside), strict=False):
            edges |= {(state, ids[START]): top, (state, ids[MESSAGE]): content}
        edges |= {(channel, ids[ANALYSIS]): analysis, (channel, ids[FINAL]): final}
        edges[top, ids[CHANNEL]] = channel
        first = top
        for token in header:
            if (first := edges.get((first, token), others[first])) < 0:
                return None
        return {
            "edges": tuple((*key, after) for key, after in edges.items()),
            "others": others,
            "end": ids[END],
            "inside": inside,
            "first": first,
            "budget": budget,
            "barred": ((channel, ids[ANALYSIS]),),
        }

    def history(
        self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Messages as the template of gpt-oss reads them: reasoning, and one call in each.

        The results of several calls follow their calls. Replaces an effort of reasoning in
        ``variables`` that the model does not know. Raises ValueError if reasoning is not a text.
        """
        effort = variables.get("reasoning_effort")
        if isinstance(effort, str) and effort in _EFFORTS:
            variables["reasoning_effort"] = _EFFORTS[effort]
        turns: list[dict[str, Any]] = []
        left = deque(messages)
        while left:
            message = left.popleft()
            reasoning = message.get("reasoning_content")
            if reasoning is not None and not isinstance(reasoning, str):
                raise refused("reasoning_content", reasoning, "must be a string")
            calls = message.get("tool_calls")
            if not calls:
                turns.append(message | ({"thinking": reasoning} if reasoning else {}))
                continue
            # later turns may have the same ids; results with no id of their own keep their order
            results = dict[Any, dict[str, Any]]()
            while left and left[0]["role"] == "tool":
                key = left[0].get("tool_call_id")
                is_new = isinstance(key, str) and key not in results
                results[key if is_new else len(results)] = left.popleft()
            thinking = "\n\n".join(filter(None, (reasoning, message["content"])))
            for call in calls:
                turns.append(message | {"content": "", "thinking": thinking, "tool_calls": [call]})
                thinking, key = "", call.get("id")
                if isinstance(key, str) and key in results:
                    turns.append(results.pop(key))
            turns += results.values()
        return turns


class MessageReader:
    """Finds the messages of a growing completion."""

    def __init__(self, harmony: Harmony, prompt: Sequence[int]) -> None:
        self._decode = harmony.decode
        self._marks = {harmony.ids[mark]: mark for mark in MARKS}
        self._messages: list[Message] = []
        self._run: list[int] = []  # tokens after the last mark
        self._num_chars = self._num_tokens = 0  # before them
        self._open: Message | None = None  # its content goes on
        self._header, self._start = "", (0, 0)  # if there is none
        header = harmony.header(prompt)
        for token in header or ():
            self._push(token)
        self._take_run()
        self._num_chars = self._num_tokens = 0
        self._messages, self._start = [], (0, 0)
        if header is None or self._open is not None:
            self._open = Message(self._header, 0, 0, 0, 0)

    def copy(self) -> "MessageReader":
        """Make a reader of another completion of the prompt, which is not read again."""
        other = copy(self)
        other._messages, other._run = [], []
        return other

    def read(self, text: str, ids: Sequence[int], *, is_final: bool) -> list[Message]:
        """Return the messages whose content has begun in the text so far.

        ``ids`` are those of the whole completion; the text may lack some of the last ones.
        """
        for token in ids[self._num_tokens + len(self._run) :]:
            self._push(token)
        messages = [*self._messages]
        if self._open is not None:
            messages.append(self._open)
        elif is_final and not _is_header(self._header + self._decode(self._run)):
            messages.append(self._plain())
        return [message for message in messages if message.begin <= len(text)]

    def _push(self, token: int) -> None:
        mark = self._marks.get(token)
        is_full = len(self._messages) >= MAX_MESSAGES
        if mark is None or (self._open is not None and (is_full or mark not in ENDS)):
            self._run.append(token)
            self._end_header()
            return
        self._take_run()
        place = self._num_chars, self._num_tokens
        self._num_chars += len(mark)
        self._num_tokens += 1
        after = self._num_chars, self._num_tokens
        if self._open is None and mark == MESSAGE:
            self._open = Message(self._header, self._start[0], after[0], self._start[1], after[1])
        elif self._open is None and mark in (CHANNEL, CONSTRAIN):
            self._header += mark
            self._end_header()
        else:
            if self._open is None and not _is_header(self._header):
                self._open = self._plain()
            if self._open is not None:
                closed = self._open._replace(end=place[0], stop=after[0], stop_token=after[1])
                self._messages.append(closed)
            self._open, self._header = None, ""
            self._start = place if mark == START else after
            if len(self._messages) >= MAX_MESSAGES:
                self._open = self._plain()

    def _take_run(self) -> None:
        text = self._decode(self._run)
        self._header += text if self._open is None else ""
        self._num_chars += len(text)
        self._num_tokens += len(self._run)
        self._run = []

    def _end_header(self) -> None:
        num_tokens = self._num_tokens + len(self._run) - self._start[1]
        if self._open is None and num_tokens > MAX_HEADER:
            self._open = self._plain()

    def _plain(self) -> Message:
        """Text where a header should be."""
        chars, tokens = self._start
        return Message("", chars, chars, tokens, tokens)


def _is_header(text: str) -> bool:
    """Whether a text may be a part of a header, and has nothing to show."""
    *words, last = _MARK.sub(" ", text).split() or [""]
    is_known = all(word in _WORDS or word.startswith("to=") for word in words)
    return is_known and (last.startswith("to=") or any(x.startswith(last) for x in _WORDS))
