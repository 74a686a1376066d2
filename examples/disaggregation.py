"""Split prefill from decode. Each side is a process, which has its own command.

    python examples/disaggregation.py prefill
    python examples/disaggregation.py decode "The sky is blue because"

Run each command in its own terminal. Without a prefill side, the decode side computes the
prompt itself.
"""

import argparse
import threading
from contextlib import suppress

from specjax import Engine

OPTIONS = {"context_length": 256, "max_running_requests": 1, "chunked_prefill_size": 64}
OPTIONS |= {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2}
PARAMS = {"max_new_tokens": 32, "temperature": 0.0}


def prefill(address: str) -> None:
    with Engine(disaggregation_mode="prefill", disaggregation_address=address, **OPTIONS) as engine:
        print(f"computes prompts at {engine.disaggregation_address}; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def decode(address: str, prompt: str) -> None:
    with Engine(disaggregation_mode="decode", disaggregation_address=address, **OPTIONS) as engine:
        engine.wait_for_peer(1.0)
        out = engine.generate(prompt, PARAMS)
        meta, [state] = out["meta_info"], engine.get_server_info()["internal_states"]
        here = engine.metrics.snapshot().prefilled_tokens
        print(prompt + out["text"])
        print(f"{meta['prompt_tokens']} prompt tokens, {here} of them computed in this process")
        print(f"first token after {1e3 * meta['time_to_first_token']:.0f} ms")
        print(f"{state['avg_spec_accept_length']:.2f} tokens per verify pass")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=["prefill", "decode"])
    parser.add_argument("prompt", nargs="?", default="The sky is blue because")
    parser.add_argument("--address", default="127.0.0.1:8998", help="host:port of the prefill side")
    args = parser.parse_args()
    if args.side == "prefill":
        prefill(args.address)
    else:
        decode(args.address, args.prompt)


if __name__ == "__main__":
    main()
