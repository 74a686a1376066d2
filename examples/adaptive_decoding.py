"""Decode requests of different kinds with the budget policy, and print the tiers that it chose.

python examples/adaptive_decoding.py
"""

import json

from specjax import Engine

PROMPTS = ["Count from one to thirty:", "Write a short poem about the sea.", "List ten fruits."]

with Engine(
    speculative_algorithm="EAGLE3",
    speculative_adaptive=True,
    speculative_adaptive_config={"candidate_steps": [0, 1, 3], "policy": "budget"},
    context_length=256,
    max_running_requests=2,
) as engine:
    answers = engine.generate(4 * PROMPTS, {"max_new_tokens": 48, "temperature": 0.0})
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in answers]
    print(f"accept length of {len(lengths)} requests: {sum(lengths) / len(lengths):.2f}")
    (state,) = engine.get_server_info()["internal_states"]
    print(json.dumps(state["adaptive"], indent=1))
