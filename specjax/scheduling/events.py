"""What a scheduler reports of its work: counts and times, for metrics."""

from typing import Protocol


class SchedulerMetrics(Protocol):
    """Hears of events in the thread that steps the scheduler; it must not block or raise.

    Times are in seconds.
    """

    def queue_changed(self, num_running: int, num_waiting: int, num_used_tokens: int) -> None:
        """So many requests run and wait now, after a step or an abort.

        ``num_used_tokens`` is what the KV pages of the running ones hold.
        """

    def request_admitted(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_seconds: float | None
    ) -> None:
        """The prefill of a text begins, of which the cached tokens need none.

        ``queue_seconds`` since the request was made. A request that resumes is admitted again, with
        ``None``; its output so far is part of its prompt then.
        """

    def tokens_prefilled(self, num_tokens: int) -> None:
        """A prefill chunk of so many tokens was dispatched."""

    def first_token(self, seconds: float) -> None:
        """A request got its first token, this long after it was made."""

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """A request got tokens; ``seconds`` since its tokens before, ``None`` for the first."""

    def drafts_verified(self, num_verifies: int, num_proposed: int, num_accepted: int) -> None:
        """Verifies of one request, with the drafts for the positions of kept tokens.

        A round that drafts nothing is no verify.
        """

    def request_retracted(self) -> None:
        """The pages of a running request were taken away; it waits to resume."""

    def request_finished(self, reason: str, seconds: float) -> None:
        """A request ended with finish reason type ``stop``, ``length`` or ``abort``.

        ``seconds`` since it was made.
        """


class NoMetrics:
    """Forgets everything that it hears."""

    def queue_changed(self, num_running: int, num_waiting: int, num_used_tokens: int) -> None:
        """Forget it."""

    def request_admitted(
        self, num_prompt_tokens: int, num_cached_tokens: int, queue_seconds: float | None
    ) -> None:
        """Forget it."""

    def tokens_prefilled(self, num_tokens: int) -> None:
        """Forget it."""

    def first_token(self, seconds: float) -> None:
        """Forget it."""

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """Forget it."""

    def drafts_verified(self, num_verifies: int, num_proposed: int, num_accepted: int) -> None:
        """Forget it."""

    def request_retracted(self) -> None:
        """Forget it."""

    def request_finished(self, reason: str, seconds: float) -> None:
        """Forget it."""
