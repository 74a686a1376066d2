"""How many pages the KV pools get."""

import os
from dataclasses import dataclass

import jax

# share of a device's memory for weights and KV together; the rest serves activations, on a CPU also
# everything else of the machine
DEFAULT_MEM_FRACTION, DEFAULT_MEM_FRACTION_CPU = 0.85, 0.5


def device_memory(device: jax.Device) -> int:
    """Bytes that the process can allocate on a device (physical memory for a CPU)."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class PoolPlan:
    """Sizes of the KV pools, padding page included in ``num_pages``."""

    num_pages: int
    page_size: int
    weight_bytes: int
    kv_bytes: int
    temporary_bytes: int  # at most, while a function runs and KV arrives from a prefill side

    @property
    def max_total_tokens(self) -> int:
        return (self.num_pages - 1) * self.page_size

    def describe(self) -> str:
        return (
            f"weights {self.weight_bytes / 1e9:.2f} GB, KV {self.kv_bytes / 1e9:.2f} GB: "
            f"{self.num_pages - 1} pages of {self.page_size} tokens, {self.max_total_tokens} "
            f"tokens; up to {self.temporary_bytes / 1e9:.2f} GB while a function runs"
        )


def plan_pools(
    *,
    memory: int,
    on_cpu: bool,
    weight_bytes: int,
    temporary_bytes: int,
    token_bytes: int,
    page_size: int,
    context_length: int,
    max_running_requests: int,
    max_total_tokens: int | None,
    mem_fraction_static: float | None,
) -> PoolPlan:
    """Decide the number of pages.

    ``max_total_tokens`` sets it directly (rounded up to pages). Otherwise weights and KV together
    take ``mem_fraction_static`` of the device's memory, as in SGLang, but never more than all
    requests can use. What functions take while they run stays free.
    """
    fraction = mem_fraction_static or (DEFAULT_MEM_FRACTION_CPU if on_cpu else DEFAULT_MEM_FRACTION)
    page_bytes = token_bytes * page_size
    room = memory - temporary_bytes - weight_bytes
    if room < 2 * page_bytes:
        raise ValueError(
            f"no KV page fits: {memory / 1e9:.2f} GB hold {weight_bytes / 1e9:.2f} GB of weights "
            f"and {temporary_bytes / 1e9:.2f} GB that functions take; lower max_running_requests, "
            "context_length, speculative_num_steps, speculative_num_draft_tokens or "
            "chunked_prefill_size"
        )
    if max_total_tokens is not None:
        num_pages = 1 - (-max_total_tokens // page_size)
        if num_pages * page_bytes > room:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} needs {num_pages * page_bytes / 1e9:.2f} GB "
                f"of KV, but {room / 1e9:.2f} GB are left beside weights and the "
                f"{temporary_bytes / 1e9:.2f} GB that functions take; lower max_total_tokens"
            )
    else:
        budget = min(int(memory * fraction) - weight_bytes, room)
        usable = max_running_requests * -(-context_length // page_size)
        num_pages = min(budget // page_bytes, usable + 1)
        if num_pages < 2:
            raise ValueError(
                f"no KV page fits: mem_fraction_static={fraction} of {memory / 1e9:.2f} GB leaves "
                f"{budget / 1e9:.2f} GB beside {weight_bytes / 1e9:.2f} GB of weights; raise "
                "mem_fraction_static"
            )
    kv_bytes = num_pages * page_bytes
    return PoolPlan(num_pages, page_size, weight_bytes, kv_bytes, temporary_bytes)
