"""Generate a text with and without speculation, and compare both.

python examples/quickstart.py "The sky is blue because"
"""

import sys

from specjax import Engine, SamplingParams

PROMPT = sys.argv[1] if len(sys.argv) > 1 else "The sky is blue because"
PARAMS = SamplingParams(temperature=0.0, max_new_tokens=48)
SIZES = {"context_length": 256, "max_running_requests": 1}

with (
    Engine("smollm2-135m", speculative_algorithm="EAGLE3", **SIZES) as fast,
    Engine("smollm2-135m", speculative_algorithm=None, share_weights_with=fast, **SIZES) as plain,
):
    out, expected = fast.generate(PROMPT, PARAMS), plain.generate(PROMPT, PARAMS)

meta = out["meta_info"]
print(PROMPT + out["text"])
print(f"accept length {meta['spec_accept_length']:.2f} in {meta['spec_verify_ct']} verify passes")
print("equal to plain decoding:", out["output_ids"] == expected["output_ids"])
