"""A runner without computation, whose calls take a simulated time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from specjax.runtime.runner_config import RunnerConfig
from specjax.sampling.params import SamplingParams
from specjax.scheduling.request import Request
from specjax.scheduling.scheduler import Scheduler
from specjax.speculative.prefill import Chunk
from specjax.types import NO_DRAFTS, DraftShape, Logprobs

from ..support.runners import algorithm_of, make_request

WIDTHS, ROUND = (128, 256, 512, 1024), 0.006
RNG = np.random.default_rng(5)


@dataclass
class Result:
    device: "Device"
    tokens: np.ndarray
    end: float
    prompt_logprobs: Logprobs | None = None
    logprobs = hidden_states = None
    tier = NO_DRAFTS

    @property
    def is_ready(self) -> bool:
        self.device.now += self.device.lateness * float(RNG.random())
        return self.device.now >= self.end

    def read(self) -> np.ndarray:
        self.device.now = max(self.device.now, self.end)
        return self.tokens


class Device:
    """A runner whose calls take the time of an 8B model on an H200, without any computation."""

    def __init__(self, num_slots: int) -> None:
        self.now = self.free = 0.0
        self.slowdown, self.lateness = 1.0, 0.0  # lateness: seconds that the host may take to read
        self.calls: list[tuple[str, float]] = []  # name and seconds of each call
        self.chunks: list[Chunk] = []
        self.config = RunnerConfig(
            algorithm=algorithm_of(None),
            shapes=(DraftShape.chain(0),),
            page_size=16,
            num_pages=20_000,
            pages_per_request=512,
            num_slots=num_slots + 1,
            batch_buckets=(num_slots,),
            prefill_buckets=WIDTHS,
            mixed_prefill_tokens=WIDTHS[-1],
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None  # tables

    def seconds(self, width: int) -> float:
        return self.slowdown * (0.002 + 23e-6 * width)

    def run(self, name: str, seconds: float) -> float:
        self.calls.append((name, seconds))
        self.free = max(self.free, self.now) + seconds
        return self.free

    def prefill(self, chunks: Sequence[Chunk], *, with_logprobs: bool = False) -> Result:
        count = sum(len(chunk.tokens) for chunk in chunks)
        width = next(
            width
            for width in WIDTHS
            if width >= count and self.config.max_chunks(width) >= len(chunks)
        )
        self.chunks += chunks
        end = self.run("prefill", self.seconds(width))
        top = np.zeros((width, 20))
        scores = Logprobs(np.zeros(width), top.astype(np.int32), top) if with_logprobs else None
        return Result(self, np.full(self.config.max_chunks(width), 7, np.int32), end, scores)

    def round(self, slots: Sequence[int], tier: DraftShape | None) -> Result:
        tokens = np.array([7, 0, 0, 1], np.int32)
        end = self.run("round", ROUND)
        return Result(self, np.tile(tokens, (1, self.config.num_slots - 1, 1)), end)

    def stalls(self) -> list[float]:
        """Seconds of prefill between each two rounds."""
        at = [i for i, (name, _) in enumerate(self.calls) if name == "round"]
        return [sum(seconds for _, seconds in self.calls[a + 1 : b]) for a, b in pairwise(at)]


def serve(device: Device, limit: float = 0.03) -> Scheduler:
    return Scheduler(device, run_ahead=1, max_prefill_stall=limit, clock=lambda: device.now)  # type: ignore[arg-type]


def requests_of(
    device: Device, lengths: Sequence[int], num_tokens: int, **options: Any
) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    clock = lambda: device.now  # noqa: E731
    return [make_request([6] * n, params, rid=str(n), clock=clock, **options) for n in lengths]


def finish(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        scheduler.step()
