"""Error messages for SGLang and vLLM options that specjax names differently or lacks."""

from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
# the option in specjax, or why there is none -> its names in SGLang and vLLM
_NAMES = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "draft": "speculative_draft_model_path speculative_model",
    "speculative_num_steps": "num_speculative_tokens",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "max_waiting_requests": "max_queued_requests",
    "chunked_prefill_size": "max_num_batched_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "page_size": "block_size",
    "seed": "random_seed",
    "batch_buckets": "cuda_graph_bs cudagraph_capture_sizes",
    "set overlap=False, on the command line --no-overlap": "disable_overlap_schedule",
    "caching is the default; disable_radix_cache turns it off": "enable_prefix_caching",
    "set draft, speculative_algorithm and speculative_num_steps": "speculative_config",
    "it is an option of 'specjax serve'": "served_model_name",
    "set JAX_PLATFORMS=cpu or cuda in the environment": "device",
    "set HF_HOME in the environment": "download_dir",
    "an engine runs on one GPU; base_gpu_id chooses it": "tp_size tensor_parallel_size dp_size "
    "data_parallel_size pp_size pipeline_parallel_size",
    "weights and KV are float32 or bfloat16": "quantization kv_cache_dtype",
    "code in a checkpoint never runs": "trust_remote_code",
    "rounds are always compiled": "disable_cuda_graph enforce_eager",
    "the device decides": "attention_backend",
    "metrics are always on": "enable_metrics",
}
ANSWERS = {name: here for here, names in _NAMES.items() for name in names.split()}


def answer(option: str) -> str | None:
    """Return the error message for ``name`` or ``--name`` if the table lists it, else ``None``."""
    here = ANSWERS.get(option.lstrip("-").replace("-", "_"))
    if here is None or not here.isidentifier():
        return here and f"{option} is not supported: {here}"
    shown = f"--{here.replace('_', '-')}" if option.startswith("-") else here
    return f"{option}: this option is called {here} here; pass {shown}"


def answers_other_names(cls: type[T]) -> type[T]:
    """Make the constructor of a dataclass raise TypeError for options that the table lists."""
    init: Any = cls.__init__

    @wraps(init)
    def checked(self: T, **options: Any) -> None:
        if text := next(filter(None, map(answer, options)), None):
            raise TypeError(text)
        init(self, **options)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls
