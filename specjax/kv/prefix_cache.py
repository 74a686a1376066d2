"""Prefix cache: a radix tree over full KV pages, so that equal prompt starts are computed once.

A page can be reused where everything that its KV depends on is equal: all tokens before it, its own
tokens, and the ``lookahead`` tokens behind it. A draft head reads token i + 1 for its KV slot i, so
with one the key of page p is ``tokens[p * page_size : (p + 1) * page_size + 1]`` and neighbouring
keys overlap by one token; without a draft head the key is the page's own tokens.

An edge holds a run of pages and is divided at a page border where two texts part, or where a match
ends. Every page on a path therefore has exactly the use and the locks of the matches through it,
and eviction takes the same pages as in a tree of single pages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.kv.pages import PageAllocator

Key = tuple[int, ...]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of pages behind the pages of ``parent``; the root, and an evicted node, have none."""

    parent: Node | None = None
    keys: list[Key] = field(default_factory=list)  # one a page
    pages: list[int] = field(default_factory=list)
    children: dict[Key, Node] = field(default_factory=dict)  # by their first key
    handles: int = 0  # locks taken on this node
    locks: int = 0  # handles of this node and of all below it
    last_used: int = 0
    queued_at: int = -1  # ``last_used`` under which it stands in the eviction queue


@dataclass(frozen=True)
class Match:
    """A cached prefix.

    It stays valid until the next :meth:`PrefixCache.evict` or :meth:`PrefixCache.flush`, and while
    ``node`` is locked through those too. A later division of ``node`` leaves it as the lower half,
    so it always ends where the match ends, and its locks count for the new upper half as well.
    """

    pages: list[int]
    num_tokens: int
    node: Node


class PrefixCache:
    """Owns the pages of finished prefixes and lends them to requests with an equal start.

    One thread uses it. Every call takes time linear in the pages that it names (and the run that it
    divides); eviction adds the logarithm of the number of leaves.

    Args:
        allocator: takes evicted pages back.
        page_size: tokens a page, as in ``allocator``.
        lookahead: tokens behind a page that its KV depends on: 1 with a draft head, else 0.

    Raises:
        ValueError: for a page size that is not the allocator's, or a negative lookahead.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, *, lookahead: int) -> None:
        if page_size != allocator.page_size:
            raise ValueError(
                f"page_size={page_size}, but the allocator has page_size={allocator.page_size}"
            )
        if lookahead < 0:
            raise ValueError(f"lookahead={lookahead}: it must be at least 0")
        self._allocator = allocator
        self._page_size = page_size
        self._lookahead = lookahead
        self._root = Node()
        self._held: set[int] = set()
        self._num_nodes = 0
        self._num_locked = 0
        self._clock = 0
        # Heap of (last_used, serial, leaf). An entry counts while the leaf has that `last_used` and
        # is unlocked; others are skipped when they come up.
        self._queue: list[tuple[int, int, Node]] = []
        self._serial = itertools.count()

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        return len(self._held)

    @property
    def num_evictable(self) -> int:
        """Pages that :meth:`evict` could free now: those that no lock protects."""
        return len(self._held) - self._num_locked

    def num_full_pages(self, num_tokens: int) -> int:
        """Pages that a text of ``num_tokens`` can offer: their lookahead is known too."""
        return max(0, num_tokens - self._lookahead) // self._page_size

    def match(self, tokens: Sequence[int]) -> Match:
        """The longest cached prefix in whole pages, marked as used now; nothing is locked.

        At least the last token is left over, because prefill needs one to sample the next from.
        """
        num_pages = max(0, len(tokens) - max(1, self._lookahead)) // self._page_size
        node, pages = self._walk(tokens, num_pages)
        return Match(pages, len(pages) * self._page_size, node)

    def lock(self, node: Node) -> None:
        """Protect the pages of a match until :meth:`unlock`; locks count.

        Raises:
            ValueError: for a node whose pages were evicted after the match.
        """
        if node.parent is None and node is not self._root:
            raise ValueError("the matched pages were evicted; match again before locking")
        node.handles += 1
        for above in self._path(node):
            if above.locks == 0:
                self._num_locked += len(above.pages)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        """Take back one :meth:`lock`.

        Raises:
            ValueError: for a node that is not locked.
        """
        if node.handles == 0:
            raise ValueError("unlock of a match that is not locked")
        node.handles -= 1
        for above in self._path(node):
            above.locks -= 1
            if above.locks == 0:
                self._num_locked -= len(above.pages)
        self._enqueue(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Offer the pages of a text, in order from its start; their KV is final.

        The cache takes over the full pages that it does not have. Pages that it owns already, such
        as those that the request got from :meth:`match`, may be among the offered ones. To go on
        using pages that it offered, a request matches and locks them.

        Args:
            tokens: the text, with the tokens behind the last page where they are known.
            pages: its pages, as many as the caller wants to offer.

        Returns:
            The offered pages that still are the caller's, to free or to use on: those that an equal
            prefix made unnecessary, and those beyond :meth:`num_full_pages`.

        Raises:
            ValueError: for the padding page, a page offered twice, or one that is cached under
                another prefix; nothing is taken over then.
        """
        num_full = min(self.num_full_pages(len(tokens)), len(pages))
        node, cached = self._walk(tokens, num_full)
        new = list(pages[len(cached) : num_full])
        duplicates = [page for page, own in zip(pages, cached, strict=False) if page != own]
        rest = [page for page in pages[num_full:] if page not in self._held]
        offered = {*duplicates, *new, *rest}
        if len(offered) != len(duplicates) + len(new) + len(rest) or 0 in offered:
            raise ValueError(f"pages {list(pages)} name a page twice or the padding page 0")
        if not self._held.isdisjoint(offered):
            wrong = sorted(self._held & offered)
            raise ValueError(f"pages {wrong} are cached under another prefix")
        if new:
            keys = [self._key(tokens, p) for p in range(len(cached), num_full)]
            self._attach(Node(node, keys, new, last_used=self._clock))
            self._held.update(new)
        return duplicates + rest

    def evict(self, num_pages: int) -> int:
        """Free pages that no lock protects, least recently used texts first and from their ends.

        Returns:
            The number of pages freed: ``num_pages``, or :attr:`num_evictable` where that is less.
        """
        freed: list[int] = []
        while len(freed) < num_pages and self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            if last_used == node.queued_at:
                node.queued_at = -1
            parent = node.parent
            if parent is None or last_used != node.last_used or node.locks or node.children:
                continue
            keep = max(0, len(node.pages) - (num_pages - len(freed)))
            freed += node.pages[keep:]
            del parent.children[node.keys[0]], node.keys[keep:], node.pages[keep:]
            node.parent = None
            self._num_nodes -= 1
            if keep:
                # another node, so that a match of all the pages can no longer be locked
                self._attach(Node(parent, node.keys, node.pages, last_used=node.last_used))
                node.keys, node.pages = [], []
            else:
                self._enqueue(parent)
        self._held.difference_update(freed)
        self._allocator.free(freed)
        return len(freed)

    def flush(self) -> int:
        """Free all pages that no lock protects, and return their number.

        Locked prefixes stay, and can be matched: what must forget everything, such as a change of
        weights, releases the running requests first.
        """
        return self.evict(self.num_evictable)

    def _key(self, tokens: Sequence[int], page: int) -> Key:
        start = page * self._page_size
        return tuple(tokens[start : start + self._page_size + self._lookahead])

    def _path(self, node: Node) -> list[Node]:
        """``node`` and all above it but the root."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path

    def _walk(self, tokens: Sequence[int], num_pages: int) -> tuple[Node, list[int]]:
        """Mark the longest cached prefix up to ``num_pages`` as used: its last node, its pages."""
        self._clock += 1
        node = self._root
        pages: list[int] = []
        while len(pages) < num_pages:
            child = node.children.get(self._key(tokens, len(pages)))
            if child is None:
                break
            start, end = len(pages), min(num_pages, len(pages) + len(child.pages))
            same = 1
            while start + same < end and child.keys[same] == self._key(tokens, start + same):
                same += 1
            node = child if same == len(child.pages) else self._divide(child, same)
            node.last_used = self._clock
            pages += node.pages
        self._enqueue(node)
        return node, pages

    def _divide(self, node: Node, at: int) -> Node:
        """Move the first ``at`` pages of ``node`` to a node above it, which the caller marks."""
        upper = Node(node.parent, node.keys[:at], node.pages[:at], locks=node.locks)
        del node.keys[:at], node.pages[:at]
        upper.children[node.keys[0]] = node
        node.parent = upper
        self._attach(upper)
        return upper

    def _attach(self, node: Node) -> None:
        """Make ``node`` a child of its parent."""
        assert node.parent is not None
        node.parent.children[node.keys[0]] = node
        self._num_nodes += 1
        self._enqueue(node)

    def _enqueue(self, node: Node) -> None:
        """Put an unlocked leaf in the eviction queue, once for each use."""
        if node.parent is None or node.children or node.locks or node.queued_at == node.last_used:
            return
        node.queued_at = node.last_used
        heapq.heappush(self._queue, (node.last_used, next(self._serial), node))
        # Entries of earlier uses pile up where nothing is evicted. At most one a node survives, so
        # dropping the others costs a constant for each entry pushed.
        if len(self._queue) > 2 * self._num_nodes + 16:
            self._queue = [
                entry
                for entry in self._queue
                if entry[0] == entry[2].queued_at and entry[2].parent is not None
            ]
            heapq.heapify(self._queue)
