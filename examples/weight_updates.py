"""Update an engine's weights from a training loop, as reinforcement learning does between rollouts.

    python examples/weight_updates.py

Nothing is compiled again, and running requests keep their text. In this example, a step adds noise
instead of a gradient. The draft head does not change, so fewer of its drafts are accepted.
"""

import jax

from specjax import Engine

PROMPT = "Once upon a time"
PARAMS = {"temperature": 0.0, "max_new_tokens": 24}
RATE = 0.02


def step(weights: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
    """Return updated weights: put your optimiser here."""
    keys = jax.random.split(key, len(weights))
    return {
        name: weight + RATE * weight.std() * jax.random.normal(key, weight.shape, weight.dtype)
        for key, (name, weight) in zip(keys, weights.items(), strict=True)
    }


def main() -> None:
    sizes = {"context_length": 256, "max_running_requests": 1}
    with Engine(speculative_algorithm="EAGLE3", **sizes) as engine:
        before = engine.generate(PROMPT, PARAMS)
        names = engine.runner.networks.target.names
        weights = dict(zip(names, engine.runner.weights[0], strict=True))
        for number in range(1, 3):
            weights = step(weights, jax.random.key(number))
            engine.update_weights_from_tensor(weights)
            out = engine.generate(PROMPT, PARAMS)
            length = out["meta_info"]["spec_accept_length"]
            print(f"step {number}, accept length {length:.2f}: {out['text']!r}")
        engine.update_weights_from_disk("smollm2-135m")
        after = engine.generate(PROMPT, PARAMS)
        print("the first weights give the first text:", after["output_ids"] == before["output_ids"])


if __name__ == "__main__":
    main()
