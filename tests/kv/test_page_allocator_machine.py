"""The page allocator as a state machine: every page is free or held, and counted once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specjax.kv.pages import PageAllocator


class Allocating(RuleBasedStateMachine):
    """Pages are taken in groups and given back in any other grouping and order."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES, 4)
        self.free_pages = set(range(1, self.NUM_PAGES))
        self.held: list[int] = []

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        pages = self.allocator.allocate(count)
        if count > len(self.free_pages):
            assert pages is None
            return
        assert pages is not None
        assert len(pages) == len(set(pages)) == count
        assert self.free_pages.issuperset(pages)
        self.free_pages -= set(pages)
        self.held += pages

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        order = data.draw(st.permutations(self.held))
        count = data.draw(st.integers(0, len(order)))
        pages, self.held = order[:count], order[count:]
        self.allocator.free(pages)
        self.free_pages.update(pages)

    @precondition(lambda self: self.free_pages)
    @rule(data=st.data())
    def free_again(self, data: st.DataObject) -> None:
        """A page that is free, among pages that are held: none of them is freed."""
        page = data.draw(st.sampled_from(sorted(self.free_pages)))
        with pytest.raises(ValueError, match=rf"\[{page}\] are not allocated"):
            self.allocator.free([*self.held, page])

    @rule(page=st.sampled_from([-1, 0, NUM_PAGES, 10**9]))
    def free_unknown(self, page: int) -> None:
        """Page 0 is the padding page: it was never handed out, so it cannot come back."""
        with pytest.raises(ValueError, match=rf"\[{page}\] are not allocated"):
            self.allocator.free([page, *self.held])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_twice_at_once(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        with pytest.raises(ValueError, match="twice"):
            self.allocator.free([*self.held, page])

    @invariant()
    def the_count_is_exact(self) -> None:
        assert self.allocator.num_free == len(self.free_pages)
        assert len(self.free_pages) + len(self.held) == self.NUM_PAGES - 1

    def teardown(self) -> None:
        """What is counted as free can be allocated, to the last page."""
        assert self.allocator.allocate(len(self.free_pages) + 1) is None
        rest = self.allocator.allocate(len(self.free_pages))
        assert rest is not None
        assert set(rest) == self.free_pages


TestAllocating = Allocating.TestCase
TestAllocating.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
