"""Two engines in one process that serve as one: one device prefills, another decodes."""

import weakref
from collections.abc import Mapping
from os import PathLike
from typing import Any

from specjax.disaggregation.decode import LocalPeer
from specjax.engine.args import EngineArgs
from specjax.engine.engine import Engine


class DisaggregatedEngine(Engine):
    """An :class:`Engine` whose prompts are computed on other devices of the process.

    Long prompts then do not delay decoding. If the prefill side fails, this side computes prompts.
    ``prefill`` has options that differ on the prefill side, such as ``tp_size``. By default, it
    uses the next devices.
    The attribute ``prefill`` is the engine of that side.
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2-135m",
        *,
        prefill: Mapping[str, Any] | None = None,
        share_weights_with: Engine | None = None,
        compile_on_use: bool = False,
        **options: Any,
    ) -> None:
        for name in ("disaggregation_address", "disaggregation_secret"):
            if options.get(name) or (prefill or {}).get(name):
                raise ValueError(f"{name} applies only to separate processes; leave it out")
        decode = EngineArgs(model=model, disaggregation_mode="decode", **options)
        self._start(decode, share_weights_with, compile_on_use)
        try:
            differing = {
                "base_gpu_id": decode.base_gpu_id + decode.tp_size,
                "kv_events_config": None,
            }
            there = options | differing | dict(prefill or {})
            args = EngineArgs(model=model, disaggregation_mode="prefill", **there)
            self.prefill = Engine._of(args, self, compile_on_use)
            self._peer = LocalPeer(self.prefill._side, self._side)
            # the peer's thread refers to both sides
            weakref.finalize(self, self._peer.close).atexit = False
        except BaseException:
            self.close()
            raise

    def flush_cache(self) -> None:
        """Drop all KV on both sides; running requests compute their KV again."""
        self.prefill.flush_cache()
        super().flush_cache()

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.prefill, self

    def get_server_info(self) -> dict[str, Any]:
        """Return the server info of this side, and that of the prefill side under ``prefill``."""
        return super().get_server_info() | {"prefill": self.prefill.get_server_info()}

    def close(self) -> None:
        """Abort running requests and free the device memory of both sides."""
        super().close()
        if (other := self.__dict__.get("prefill")) is not None:
            other.close()
