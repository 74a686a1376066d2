"""Refuse habits that make prose and names hard to read: `make lint` runs this.

Markdown is checked as a whole, without code blocks. In Python files comments and strings are
checked, and outside tests the names of variables. Subjects of commits that the main branch does not
have must be short. CONTRIBUTING.md has the rules that a machine cannot check.
"""

import ast
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
# words that do not say what a value is
FILLERS = frozenset(
    "asked both each first found given kept known left made many more new old one others own part "
    "parts rest same seen shown some taken tried used wanted what whole".split()
)
MAX_FILLERS = 0.005  # as a fraction of all names that are bound
NAMED = ("specjax", "kernels", "scripts")
MAX_SUBJECT = 72


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


def bindings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each variable, attribute and parameter that a file binds."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.MatchAs(name=str(name))
            ):
                yield node.lineno, name


def check_names(paths: list[Path]) -> int:
    """Print the fillers and return their number if they are too many."""
    names = [(path, line, name) for path in paths for line, name in bindings(path)]
    fillers = [binding for binding in names if binding[2].strip("_") in FILLERS]
    if len(fillers) <= MAX_FILLERS * len(names):
        return 0
    for path, line, name in fillers:
        print(f"{path}:{line}: {name!r}: a filler; write what the value is")
    print(f"{len(fillers)} of {len(names)} names are fillers; the limit is {MAX_FILLERS:.1%}")
    return len(fillers)


def check_subjects(base: str) -> int:
    """Check the commits that ``base`` does not have; an unknown ``base`` has them all."""
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{base}..HEAD"]
    commits = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    subjects = [commit.split(" ", 1) for commit in commits]
    long = [(commit, subject) for commit, subject in subjects if len(subject) > MAX_SUBJECT]
    for commit, subject in long:
        print(f"{commit}: {subject!r}: {len(subject)} characters; the limit is {MAX_SUBJECT}")
    return len(long)


def main(base: str = "origin/main") -> int:
    command = ["git", "ls-files", "*.md", *(f"{folder}/*.py" for folder in FOLDERS)]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    paths = [Path(line) for line in listed.splitlines()]
    code = [path for path in paths if path.suffix == ".py" and path.parts[0] in NAMED]
    count = check_subjects(base) + check_names(code)
    for path in paths:
        if path == Path("scripts/check_prose.py"):
            continue
        for start, text in prose(path):
            for number, words, advice in findings(text, start):
                print(f"{path}:{number}: {words!r}: {advice}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
