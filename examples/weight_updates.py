"""Update an engine's weights from a training loop, as in reinforcement learning between rollouts.

    python examples/weight_updates.py

<<<<<<< HEAD
Nothing is compiled again, and running requests keep their text. The "training" here scales the
final norm to show that the texts follow the weights.
=======
Nothing compiles again, and running requests keep their text. The step here is noise instead of a
gradient. The texts follow the weights; the draft head does not, so it is accepted less often.
>>>>>>> 5d67a85 (examples: quickstart, chat, log-probabilities, adaptive server, weight updates)
"""

import jax

from specjax import Engine

PROMPT = "Once upon a time"
PARAMS = {"temperature": 0.0, "max_new_tokens": 24}
RATE = 0.02

<<<<<<< HEAD
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
=======

def step(weights: dict[str, jax.Array], key: jax.Array) -> dict[str, jax.Array]:
    """Return updated weights: put your optimiser here."""
    keys = jax.random.split(key, len(weights))
    return {
        name: weight + RATE * weight.std() * jax.random.normal(key, weight.shape, weight.dtype)
        for key, (name, weight) in zip(keys, weights.items(), strict=True)
    }


def main() -> None:
    sizes = {"context_length": 128, "max_running_requests": 1}
    with Engine(speculative_algorithm="EAGLE3", **sizes) as engine:
        before = engine.generate(PROMPT, PARAMS)
        names = engine.runner.networks.target.names
        weights = dict(zip(names, engine.runner.weights[0], strict=True))
        for number in range(1, 4):
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
>>>>>>> 5d67a85 (examples: quickstart, chat, log-probabilities, adaptive server, weight updates)
