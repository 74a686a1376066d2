"""The page at ``/``: what is sent, and what a browser makes of it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from specjax import Engine
from specjax.server import make_app
from specjax.testing import Client, running

from ..conftest import COMPILED
from ..support.server_process import COMMAND

SECONDS = 120.0
OPTIONS = (
    "serve --model smollm2-135m --served-model-name smollm2 --port 0 --api-key sécret --quiet "
    "--context-length 256 --max-running-requests 1 --speculative-num-steps 2 "
    "--chunked-prefill-size 64 --speculative-adaptive"
)
# two drafted tokens, and none for a batch that wants none
TIERS = {"candidate_steps": [0, 2], "warmup_batches": 10**6}


def test_the_page_needs_neither_key_nor_engine() -> None:
    future: Future[Engine] = Future()
    with running(make_app(future, api_key="secret")) as port:
        client = Client(port)
        answer = client.get("/")
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert client.ask("HEAD", "/").status == 200
        assert client.post("/").status == 405


def test_the_page_has_all_it_needs_and_may_use_nothing_else(client) -> None:
    answer = client.get("/")
    text = answer.body.decode()
    assert not re.search(r"(https?:)?//\w", re.sub(r"\s// .*", "", text))
    assert "innerHTML" not in text
    assert not re.search(r"\s(style|on\w+)=", text)  # the policy would block it
    parts = answer.headers["content-security-policy"].split("; ")
    policy = dict(part.split(" ", 1) for part in parts)
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert set(policy.values()) - {"'none'", "'self'", "data:"} == {
        policy["script-src"],
        policy["style-src"],
    }


def test_the_page_learns_whether_there_is_a_chat_template(client) -> None:
    assert client.get("/get_model_info").json()["has_chat_template"] is True


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """Debian's chromium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    browser, service = which("chromium"), which("chromedriver")
    if browser is None or service is None:
        pytest.skip("chromium or chromedriver (Debian: chromium-driver) is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # root has no sandbox
    for name in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1280,844"):
        options.add_argument(f"--{name}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options, webdriver.ChromeService(service))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """A server with the embedded model."""
    path = tmp_path_factory.mktemp("tiers") / "tiers.json"
    path.write_text(json.dumps(TIERS))
    files = ["--compile-cache-dir", str(COMPILED), "--speculative-adaptive-config", str(path)]
    command = [*COMMAND, *OPTIONS.split(), *files]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()


class Page:
    """The page in a browser, as a user sees it."""

    def __init__(self, driver: Any) -> None:
        from selenium.webdriver.support.wait import WebDriverWait

        self.driver = driver
        self._wait = WebDriverWait(driver, SECONDS, poll_frequency=0.05)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def until(self, condition: Any) -> Any:
        return self._wait.until(lambda _: condition())

    def type(self, selector: str, text: str) -> None:
        field = self.one(selector)
        self.driver.execute_script("arguments[0].value = ''", field)
        field.send_keys(text)

    def figures(self) -> dict[str, str]:
        return dict(zip(self.texts("figcaption > span"), self.texts("figcaption > b"), strict=True))

    def screenshot(self, name: str, folder: Path, *, width: int, dark: bool) -> None:
        run = self.driver.execute_cdp_cmd
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
        run("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        run("Emulation.setEmulatedMedia", {"features": [scheme]})
        scrolled = "document.documentElement.scrollWidth <= innerWidth"
        assert self.driver.execute_script(f"return {scrolled}"), f"{name} is wider than its window"
        self.driver.save_screenshot(str(folder / f"{name}.png"))


RENDERED = """
const pieces = JSON.parse(arguments[0]).map(([text, is_draft]) => ({ text, is_draft }));
const parent = document.createElement("div");
render(parent, pieces);
return [parent.innerHTML, parent.textContent, [...parent.querySelectorAll(".draft")].map(
  (element) => element.textContent).join("")];
"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("plain <b>text</b>", []),
        ("a `b` **c**", ["code", "strong"]),
        ("# Title\n**x** `y`", ["strong", "strong", "code"]),
        ("see\n```python\na = `1`\n```\nend", ["pre", "code"]),
        ("```\nnot closed **yet**", ["pre", "code"]),
    ],
)
def test_markdown_keeps_the_marks_of_drafts(driver, address, text, tags) -> None:
    if driver.current_url != f"{address}/":
        driver.get(address)
    pieces = [[text[i : i + 3], i % 2 == 1] for i in range(0, len(text), 3)]
    html, shown, drafts = driver.execute_script(RENDERED, json.dumps(pieces))
    assert re.findall(r"<(?!span|/)(\w+)", html) == tags
    kept = iter(text)  # what is shown is the text without its marks
    assert all(character in kept for character in shown)
    hidden = set("`*#\n ") | set("python")
    assert not set(text) - set(shown) - hidden
    kept = iter("".join(piece for piece, is_draft in pieces if is_draft))
    assert all(character in kept for character in drafts)


@pytest.mark.slow
@pytest.mark.browser
def test_calls_without_results_are_text_in_the_history(driver, address) -> None:
    """Templates refuse a call without its result, and a call that was cut off."""
    if driver.current_url != f"{address}/":
        driver.get(address)
    calls = [
        {"index": i, "id": "1", "type": "function", "function": {"name": name, "arguments": text}}
        for i, (name, text) in enumerate((("f", '{"x": 1}'), ("g", '{"y": "cu')))
    ]
    for text, made, content in (
        ("yes", [], "yes"),
        ("", calls, 'f({"x": 1})\ng({"y": "cu)'),
        ("I call", calls[:1], 'I call\nf({"x": 1})'),
    ):
        turn = driver.execute_script("return turnOf(...arguments)", text, made)
        assert turn == {"role": "assistant", "content": content}


POLICY = """
const names = ["rounds", "plain_rounds", "expected_tokens", "realised_tokens"];
polls.push(...arguments[0].map((values) => values && Object.fromEntries(
  names.map((name, i) => [`spec_${name}_total`, values[i]]))));
showPolicy();
const shown = $("policy").hidden ? "" : $("policy").textContent;
polls.length = 0;
return shown;
"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(
    ("polls", "shown"),
    [
        ([[10, 0, 8.0, 8.0], None, [100, 50, 10.0, 8.0], [300, 60, 110.0, 98.0]], "5 %, 90 %"),
        ([[100, 50, 10.0, 8.0], [110, 60, 10.0, 8.0]], "100 %"),
        ([[100, 50, 10.0, 8.0]], ""),
        ([[100, 50, 10.0, 8.0], [110, 60, 10.0, 8.0], None], ""),
        ([[1, 1], [2, 2]], ""),  # another policy
    ],
)
def test_the_page_compares_expected_with_realised_tokens(driver, address, polls, shown) -> None:
    if driver.current_url != f"{address}/":
        driver.get(address)
    text = driver.execute_script(POLICY, polls)
    assert ", ".join(re.findall(r"\d+ %", text)) == shown
    assert text.startswith("budget policy: ") == bool(shown)


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_shows_streamed_text_and_moving_figures(driver, address, tmp_path) -> None:
    page = Page(driver)
    driver.get(address)
    page.until(lambda: page.texts("#state") == ["API key needed"])
    page.type("#prompt", "Hello\n")
    page.until(lambda: page.texts(".assistant .error") == ["the server wants an API key"])
    assert page.one("#prompt").get_property("value") == "Hello"  # to be sent again
    page.type("#key", "sécret\t")
    page.until(lambda: page.texts("#state") == ["ready"])
    assert page.texts("#model") == ["smollm2"]
    page.one("#clear").click()
    assert page.one("#welcome").is_displayed()
    page.type("#temperature", "-1")
    page.all("#welcome button")[0].click()
    assert page.all(".user") == []  # refused before it is sent
    page.type("#temperature", "0")
    page.type("#prompt", "")

    idle = page.until(page.figures)
    assert len(idle) == 5
    page.type("#max-tokens", "120")
    page.type("#prompt", "Write a list of ten fruits, one on each line.")
    page.one("#prompt").send_keys("\n")
    lengths = {len(page.until(lambda: page.texts(".assistant .text")[0]))}
    moved = set()
    while page.one("#stop").is_displayed():
        lengths.add(len(page.texts(".assistant .text")[0]))
        moved |= {name for name, value in page.figures().items() if value != idle[name]}
    assert len(lengths) > 3  # it came bit by bit
    assert {"Output tokens/s", "Accept length, mean of 10 s", "KV use", "Requests"} <= moved
    assert "".join(page.texts(".assistant .draft")).strip()
    assert page.all(".assistant .text span:not(.draft)")
    (figures,) = page.texts(".assistant p.small")
    assert re.match(r"\d+ tokens · [\d.]+ tokens/s · accept length [\d.]+ · 0 of \d+", figures)

    text = page.texts(".assistant .text")
    page.one(".again").click()
    page.until(lambda: page.texts(".assistant p.small")[0])
    assert page.texts(".assistant .text") == text
    page.one("#colours").click()
    draft = page.all(".assistant .draft")[0]
    assert draft.value_of_css_property("background-color") == "rgba(0, 0, 0, 0)"
    page.one("#colours").click()
    (rate,) = page.texts("#rates")
    assert re.fullmatch(r"with drafts [\d.]+ tokens/s", rate)
    text = page.one(".assistant .text").get_property("textContent")
    page.one("#speculate").click()
    page.one(".again").click()
    page.until(lambda: page.texts(".assistant p.small")[0])
    assert page.one(".assistant .text").get_property("textContent") == text
    assert not page.all(".assistant .draft")
    assert "accept length" not in page.texts(".assistant p.small")[0]
    (rates,) = page.texts("#rates")
    assert re.fullmatch(rf"plain [\d.]+ tokens/s · {rate}", rates)
    page.one("#speculate").click()

    # the conversation goes on, and ends when the user says so
    page.type("#max-tokens", "")
    page.type("#prompt", "Tell <b>a long story</b>.\n")
    page.until(lambda: page.texts(".assistant .text")[1:] and page.texts(".assistant .text")[1])
    page.one("#stop").click()
    page.until(lambda: page.texts(".assistant p.small")[1] == "stopped")
    assert page.texts(".user .text")[1] == "Tell <b>a long story</b>."
    page.until(lambda: page.figures()["Requests"] == "0 running 0 queued")

    folder = Path(os.environ.get("SPECJAX_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    for width, kind in ((1280, "desktop"), (390, "phone")):
        for dark in (False, True):
            name = f"page-{kind}-{'dark' if dark else 'light'}"
            page.screenshot(name, folder, width=width, dark=dark)
    # the refused requests at the beginning are the only errors
    log = [entry["message"] for entry in driver.get_log("browser")]
    assert all("401" in message for message in log), log
