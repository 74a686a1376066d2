"""Update an engine's weights from a training loop, as in reinforcement learning between rollouts.

    python examples/weight_updates.py

Nothing is compiled again, and running requests keep their text. The "training" here scales the
final norm to show that the texts follow the weights.
"""

import jax.numpy as jnp
import numpy as np

from specjax import Engine

PROMPT = "Once upon a time"
PARAMS = {"temperature": 0.0, "max_new_tokens": 24}
NORM = "model.norm.weight"

with Engine(speculative_algorithm="EAGLE3", context_length=128, max_running_requests=1) as engine:
    before = engine.generate(PROMPT, PARAMS)
    hidden_size = engine.target.config.hidden_size
    for step, scale in enumerate((0.5, 2.0), 1):
        norm = jnp.asarray(np.full(hidden_size, scale, np.float32))  # the result of your optimiser
        engine.update_weights_from_tensor({NORM: norm})
        out = engine.generate(PROMPT, PARAMS)
        print(f"step {step}: {out['text']!r}, accept length", end=" ")
        print(f"{out['meta_info']['spec_accept_length']:.2f}")
    engine.update_weights_from_disk("smollm2-135m")
    after = engine.generate(PROMPT, PARAMS)
    print("as before:", after["output_ids"] == before["output_ids"])
