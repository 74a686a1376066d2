"""Snapshots: states of recurrent layers at ends of pages, where other requests may continue.

Layers of attention can continue after any cached page, recurrent layers only where their states
were kept. A snapshot is a slot of the pool of states, and belongs to the page at whose end it was
taken. Prefill writes it as it passes this position: the last one of a prompt, and the one where the
prompt leaves a longer cached prefix, because others may leave it there too. Positions are multiples
of pages and of groups of rows, so that a text has the same states with and without a snapshot. If
slots run out, the least recently used snapshot is taken back, and before it those at the ends of
prompts that were read once: by the next turn of a chat, which has left a later one.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from specjax.kv.holding import PageHolding, move_entries


class Snapshots:
    """Gives slots for snapshots to the pages of texts; only one thread may use it.

    Args:
        slots: the slots of the pool of states that are for snapshots.
        step: number of rows in a group.
        lookahead: that of the prefix cache.
    """

    num_used_tokens = 0  # in pages of its own

    def __init__(self, slots: Iterable[int], page_size: int, step: int, lookahead: int) -> None:
        self._free, self._page_size = list(slots), page_size
        self._step, self._num_unmatched = math.lcm(page_size, step), max(1, lookahead)
        # slot of each page that has one, in the order in which they are taken back
        self._page_map: OrderedDict[int, int] = OrderedDict()
        # slots of snapshots that count as used when they are read: at branches, or read before
        self._shared: set[int] = set()
        # of chunks not dispatched yet: holdings whose states are kept, and slots that are read
        self._begun: dict[PageHolding, None] = {}
        self._sources: set[int] = set()

    def usable(self, pages: Sequence[int]) -> int:
        """Number of leading pages of a cached prefix after which a request can continue."""
        for count in range(len(pages), 0, -1):
            if pages[count - 1] in self._page_map:
                return count
        return 0

    def awaits(self, text: list[int], count: int) -> bool:
        """Whether the next dispatch keeps states of a text further on than after ``count`` pages.

        A request with this text had better be admitted after that.
        """
        begin = count * self._page_size
        for other in self._begun:
            keys = other.cache_keys(other.prefill_ids)
            for at in other.kept_states:
                # first what follows the part that is often common, and long
                if at > begin and text[begin:at] == keys[begin:at] and text[:begin] == keys[:begin]:
                    return True
        return False

    def prepare_chunk(self, holding: PageHolding, end: int, running: Iterable[PageHolding]) -> None:
        """Give slots to the states that a chunk up to ``end`` reads and keeps."""
        begin = holding.kv_len
        if begin == holding.num_cached > 0:
            page = self._page_at(holding, begin)
            holding.state_source = source = self._page_map[page]
            self._page_map.move_to_end(page, last=source in self._shared)
            self._shared.add(source)
            self._sources.add(source)
        lengths = holding.num_matched, len(holding.prefill_ids) - self._num_unmatched
        for position in {length - length % self._step for length in lengths}:
            if begin < position <= end and (slot := self._take()):
                holding.kept_states[position] = slot
                self._begun[holding] = None

    def chunks_dispatched(self) -> None:
        """Give the snapshots of prepared chunks to their pages: later dispatches may read them."""
        for holding in self._begun:
            for position, slot in holding.kept_states.items():
                self._page_map[self._page_at(holding, position)] = slot
                if position <= holding.num_matched:
                    self._shared.add(slot)
            holding.kept_states.clear()
        self._begun.clear()
        self._sources.clear()

    def end(self, holding: PageHolding) -> None:
        """Take back the slots of chunks that were not dispatched."""
        self._free += holding.kept_states.values()
        holding.kept_states.clear()
        self._begun.pop(holding, None)

    def grow(self, holdings: Sequence[PageHolding], running: Iterable[PageHolding]) -> bool:
        """Rounds need no snapshots."""
        return True

    def move(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Give snapshots of ``sources`` to ``targets``, pages of equal text that have none."""
        move_entries(self._page_map, sources, targets)

    def replace(self, holding: PageHolding, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Use ``targets`` instead of ``sources`` of equal text in a holding."""
        self.move(sources, targets)

    def drop(self, pages: Iterable[int]) -> None:
        """Take back the snapshots of pages that are freed."""
        slots = [self._page_map.pop(page) for page in pages if page in self._page_map]
        self._shared.difference_update(slots)
        self._free += slots

    def _page_at(self, holding: PageHolding, position: int) -> int:
        return holding.pages[position // self._page_size - 1]

    def _take(self) -> int:
        """A free slot, else that of the least recently used snapshot; 0 if all are in use."""
        unread = (page for page, slot in self._page_map.items() if slot not in self._sources)
        if not self._free and (page := next(unread, None)) is not None:
            self.drop([page])
        return self._free.pop() if self._free else 0
