"""Chat in the terminal with streamed answers. /new starts a new conversation, Ctrl-D ends.

python examples/streaming_chat.py --temperature 0.7
"""

import argparse

from specjax import Engine


def answer(engine: Engine, chat: list[dict[str, str]], temperature: float) -> str:
    """Print the answer to a conversation as it streams, and return it."""
    shown = ""
    params = {"temperature": temperature, "max_new_tokens": 256}
    for part in engine.generate(messages=chat, sampling_params=params, stream=True):
        print(part["text"][len(shown) :], end="", flush=True)  # texts are cumulative
        shown = part["text"]
    meta = part["meta_info"]
    print(f"\n[{meta['completion_tokens']} tokens, accept length {meta['spec_accept_length']:.2f}]")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: 0.7)")
    args = parser.parse_args()
    with Engine(speculative_algorithm="EAGLE3", max_running_requests=1) as engine:
        chat: list[dict[str, str]] = []
        while True:
            try:
                question = input("> ")
            except EOFError:
                return
            if question == "/new":
                chat = []
                continue
            chat.append({"role": "user", "content": question})
            text = answer(engine, chat, args.temperature)
            chat.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main()
