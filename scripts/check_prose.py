"""Refuse habits that make prose hard to read: `make lint` runs this over all tracked files.

Markdown is checked as a whole, without code blocks. In Python files comments and strings are
checked. CONTRIBUTING.md has the rules that a machine cannot check.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("specjax", "kernels", "scripts", "examples", "tests")
COUNTED = (
    "tokens|rows|seconds|microseconds|ms|us|µs|steps|pages|values|bytes|[MG]B|pairs|keys|requests|"
    "branches|drafts|rounds|maps|kernels|launches|calls|passes|blocks"
)
PER = "second|minute|round|token|request|step|pass|call|layer|level|row|position|verify|line|page"
HABITS = {
    rf"(?i)\b({COUNTED}) an? ({PER})\b": "a rate: write per",
    r"(?i)\bbehind\b": "write after",
    r"(?i)\bbeside\b": "write next to, alongside, or in addition to",
    r"(?i)\banew\b": "write again",
    r"\b(is|are|was|were) no (?!longer|more|less|fewer|\w+er\b)[a-z]": "write is not, or must be",
    r"^\W*What (?!(is|are|was|do|does|did|should)\b)": "begin with a noun",
    r"\b(so many|so long) (?!as\b)": "write this many, or as long as",
    r"(?i)\bnewest token": "write last token",
}


def findings(text: str, first_line: int) -> Iterator[tuple[int, str, str]]:
    """Yield line, words and advice for each habit in a text."""
    for number, line in enumerate(text.splitlines(), first_line):
        for pattern, advice in HABITS.items():
            for match in re.finditer(pattern, line):
                yield number, match[0].strip(), advice


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each piece of prose in a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1))
        if token.type in kinds:
            yield token.start[0], token.string


def main() -> int:
    command = ["git", "ls-files", "*.md", *(f"{folder}/*.py" for folder in FOLDERS)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    count = 0
    for path in map(Path, listed.splitlines()):
        if path == Path("scripts/check_prose.py"):
            continue
        for start, text in prose(path):
            for number, words, advice in findings(text, start):
                print(f"{path}:{number}: {words!r}: {advice}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
