"""Figures beside a text: tokens used, and what speculation did."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

Meta = dict[str, Any]  # of a result
# of ``meta_info``, what an OpenAI answer has elsewhere or is as long as the text
_LONG = frozenset(
    "id finish_reason output_token_logprobs output_top_logprobs input_token_logprobs "
    "input_top_logprobs output_is_draft".split()
)


def usage(metas: Sequence[Meta], num_samples: int) -> Meta:
    """Tokens of a request; samples of one prompt follow each other, and count it once."""
    firsts = metas[::num_samples]
    prompt = sum(meta["prompt_tokens"] for meta in firsts)
    completion = sum(meta["completion_tokens"] for meta in metas)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(meta["cached_tokens"] for meta in firsts)},
    }


def choice_meta(meta: Meta) -> Meta:
    """What a choice has of its ``meta_info``."""
    return {name: value for name, value in meta.items() if name not in _LONG}


def speculative_metrics(metas: Sequence[Meta]) -> Meta | None:
    """Acceptance over all choices, under vLLM's names; ``None`` where nothing speculated."""
    metas = [meta for meta in metas if "spec_verify_ct" in meta]
    if not metas:
        return None
    verifies = sum(meta["spec_verify_ct"] for meta in metas)
    accepted = sum(meta["spec_num_correct_drafts"] for meta in metas)
    proposed = sum(meta["spec_num_proposed_drafts"] for meta in metas)
    counts = [meta["spec_correct_drafts_histogram"] for meta in metas]
    histogram = [sum(column) for column in zip_longest(*counts, fillvalue=0)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / verifies if verifies else 0.0,
            "draft_acceptance_rate": accepted / proposed if proposed else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": verifies,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": proposed,
            "num_spec_tokens": len(histogram) - 1,
        }
    }
