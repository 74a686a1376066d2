"""An engine for the benchmarks that computes nothing."""

from types import SimpleNamespace
from typing import Any

from ..loading import load_bench
from ..tiny_checkpoints import letter_tokenizer

SIZES = load_bench("common").SIZES


class FakeEngine:
    """Answers each prompt with its last token again and again, two tokens a verify.

    Attributes:
        made: the options of all engines, in the order of their making.
        wrong: modes by their number of steps that answer with another token.
    """

    made: list[dict[str, Any]]
    wrong: tuple[int, ...] = ()
    tokenizer = letter_tokenizer()
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=97, dtype="float32"))
    context_length = 64

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.options = options
        self.steps = options.get("speculative_num_steps") or 0
        self.flushes = 0

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True

    def flush_cache(self) -> None:
        self.flushes += 1

    def get_server_info(self) -> dict[str, Any]:
        state: dict[str, Any] = {"speculative_num_steps": self.steps}
        if self.options.get("speculative_adaptive"):
            state["adaptive"] = {"switches": 2, **self.options["speculative_adaptive_config"]}
        return dict.fromkeys(SIZES, 1) | {
            "model_path": "/some/where/tiny",
            "dtype": "float32",
            "context_length": self.context_length,
            "simulate_accept_length": self.options.get("simulate_accept_length"),
            "max_running_requests": self.options["max_running_requests"] or 4,
            "internal_states": [state],
        }

    def generate(self, *, input_ids: Any, sampling_params: Any) -> list[dict[str, Any]]:
        return [
            self._answer(ids, one["max_new_tokens"])
            for ids, one in zip(input_ids, sampling_params, strict=True)
        ]

    def _answer(self, ids: list[int], count: int) -> dict[str, Any]:
        if len(ids) >= self.context_length:
            raise ValueError(f"no room in context_length={self.context_length}")
        meta = {
            "prompt_tokens": len(ids),
            "completion_tokens": count,
            "finish_reason": {"type": "length"},
            "e2e_latency": 0.5,
            "queue_time": 0.25,
            "num_retractions": 0,
            "cached_tokens": 1,
        }
        if self.steps:
            verifies = max(1, count // 2)
            meta |= {
                "spec_verify_ct": verifies,
                "spec_accept_length": count / verifies,
                "spec_num_correct_drafts": verifies,
                "spec_num_proposed_drafts": self.steps * verifies,
                "spec_correct_drafts_histogram": [0, verifies],
                "spec_rounds_by_steps": {str(self.steps): verifies},
            }
        return {"output_ids": [ids[-1] + (self.steps in self.wrong)] * count, "meta_info": meta}
