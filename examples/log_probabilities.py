"""Score a batch of prompts, and list the most likely alternatives to each generated token.

python examples/log_probabilities.py
"""

from specjax import Engine

PROMPTS = ["The capital of France is", "The capital of Italy is", "2 + 2 ="]
PARAMS = {"temperature": 0.0, "max_new_tokens": 4}

with Engine(speculative_algorithm="EAGLE3", context_length=128, max_running_requests=3) as engine:
    outs = engine.generate(
        PROMPTS,
        PARAMS,
        return_logprob=True,
        logprob_start_len=0,  # include prompt tokens
        top_logprobs_num=3,
    )
    decode = engine.tokenizer.decode
    for prompt, out in zip(PROMPTS, outs, strict=True):
        meta = out["meta_info"]
        scores = [logprob for logprob, _, _ in meta["input_token_logprobs"] if logprob is not None]
        print(f"{prompt!r}: {sum(scores):.2f} nats over {len(scores)} tokens")
        alternatives = meta["output_top_logprobs"]
        for (logprob, token, _), others in zip(
            meta["output_token_logprobs"], alternatives, strict=True
        ):
            shown = ", ".join(f"{decode([other])!r} {score:.2f}" for score, other, _ in others)
            print(f"    {decode([token])!r} {logprob:.2f}   of {shown}")
