"""Serve with adaptive decoding, send requests, and print the tiers that the policy chose.

python examples/adaptive_server.py --requests 32
"""

import argparse
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

import uvicorn

from specjax import Engine
from specjax.server import make_app

PROMPTS = ["Count from one to thirty:", "Write a short poem about the sea.", "List ten fruits."]


def ask(url: str, number: int) -> float:
    """Send one request and return its accept length."""
    body = {"prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 48, "temperature": 0}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{url}/v1/completions", data, headers)) as answer:
        return json.load(answer)["choices"][0]["meta_info"]["spec_accept_length"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=16, help="number of requests (default: 16)")
    args = parser.parse_args()
    with Engine(
        speculative_algorithm="EAGLE3",
        speculative_adaptive=True,
        speculative_adaptive_config={"candidate_steps": [0, 1, 3], "policy": "budget"},
        context_length=256,
        max_running_requests=4,
    ) as engine:
        config = uvicorn.Config(make_app(engine), port=0, log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        with ThreadPoolExecutor(4) as pool:
            numbers = range(args.requests)
            lengths = list(pool.map(ask, [f"http://127.0.0.1:{port}"] * len(numbers), numbers))
        server.should_exit = True
        thread.join()
        print(f"accept length of {len(lengths)} requests: {sum(lengths) / len(lengths):.2f}")
        (state,) = engine.get_server_info()["internal_states"]
        print(json.dumps(state["adaptive"], indent=1))


if __name__ == "__main__":
    main()
