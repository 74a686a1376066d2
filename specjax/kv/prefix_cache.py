"""Prefix cache: a radix tree of full KV pages, so that equal prompt prefixes are computed once.

A page can be reused if all tokens on which its KV depends are equal: the tokens before it, its own
tokens, and the ``lookahead`` tokens after it. A draft head reads token i + 1 for its KV index i.
With a draft head, the key of page p is therefore ``tokens[p * page_size : (p + 1) * page_size +
1]``, and adjacent keys overlap by one token. Without one, the key is the page's own tokens. The
lookahead also includes later tokens that must be known before KV is final.

A node's page follows its parent's page. A lock protects all pages on the path to a node. Unlocked
pages are in one queue, least recently used first; the later pages of a text come before its earlier
ones. Eviction takes pages from the front, so texts lose their ends first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specjax.kv.pages import PageAllocator

Key = tuple[int, ...]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A cached page, which follows that of ``parent``; the root and evicted pages have none."""

    parent: Node | None = None
    key: Key = ()
    page: int = 0
    children: dict[Key, Node] = field(default_factory=dict)
    locks: int = 0  # number of locks taken on this node and all nodes below it


class Watcher(Protocol):
    """Learns which pages a cache has."""

    def stored(self, nodes: Sequence[Node]) -> None:
        """Nodes were added, each the parent of the next."""

    def removed(self, nodes: Sequence[Node], *, is_empty: bool) -> None:
        """Nodes were evicted; the cache may be empty now."""


class PrefixCache:
    """Owns the pages of cached prefixes and lends them to requests with an equal prefix.

    Only one thread may use it. Each call takes time linear in its number of pages. ``lookahead`` is
    the number of tokens after a page on which its KV depends or for which it waits. ``watcher``
    may be set while the cache is empty.
    """

    def __init__(self, allocator: PageAllocator, *, lookahead: int) -> None:
        if lookahead < 0:
            raise ValueError(f"lookahead={lookahead} must be at least 0")
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._lookahead = lookahead
        self._root = Node()
        self._held: set[int] = set()
        self._evictable: OrderedDict[Node, None] = OrderedDict()
        self.watcher: Watcher | None = None

    @property
    def num_pages(self) -> int:
        return len(self._held)

    @property
    def num_evictable(self) -> int:
        """Number of unlocked pages, which :meth:`evict` can free."""
        return len(self._evictable)

    def num_full_pages(self, num_tokens: int) -> int:
        """Number of full pages, with known lookahead, in a text of ``num_tokens`` tokens."""
        return max(0, num_tokens - self._lookahead) // self._page_size

    def num_matched_pages(self, num_tokens: int) -> int:
        """Maximum number of pages that :meth:`match` finds for a text of ``num_tokens``."""
        return max(0, num_tokens - max(1, self._lookahead)) // self._page_size

    def match(self, tokens: Sequence[int], limit: int | None = None) -> tuple[Node, list[int]]:
        """Find the longest cached prefix of a text in full pages, and mark it as used now.

        The prefix has at most ``limit`` tokens. It never includes the last token, because prefill
        must run it to sample the next. Returns the node of the last page, and all pages. Eviction
        makes them invalid unless locked.
        """
        num_pages = self.num_matched_pages(len(tokens))
        if limit is not None:
            num_pages = min(num_pages, limit // self._page_size)
        node, pages = self._walk(tokens, num_pages)
        self._mark_used(node)
        return node, pages

    def lock(self, node: Node) -> None:
        """Protect the pages of a match until :meth:`unlock`; locks are counted."""
        if node.parent is None and node is not self._root:
            raise ValueError("the matched pages were evicted; match again before locking")
        for above in self._upwards(node):
            if above.locks == 0:
                del self._evictable[above]
            above.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one :meth:`lock`; pages without another lock are marked as used now."""
        for above in self._upwards(node):
            above.locks -= 1
        self._mark_used(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Offer the pages of a text, from its start on, to the cache; their KV must be final.

        The cache takes over full pages that it lacks. The offered pages may include pages that it
        already owns, such as those from :meth:`match`. To use offered pages further, the caller
        matches and locks them. ``tokens`` may be longer than the pages if later tokens are known.

        Returns:
            Pages that the caller still owns: duplicates, and pages after :meth:`num_full_pages`.
        """
        num_full = min(self.num_full_pages(len(tokens)), len(pages))
        node, cached = self._walk(tokens, num_full)
        added = list(pages[len(cached) : num_full])
        duplicates = [page for page, held in zip(pages, cached, strict=False) if page != held]
        trailing = [page for page in pages[num_full:] if page not in self._held]
        nodes = []
        for index, page in enumerate(added, len(cached)):
            parent, key = node, self._key(tokens, index)
            node = parent.children[key] = Node(parent, key, page)
            nodes.append(node)
        self._held.update(added)
        if nodes and self.watcher is not None:
            self.watcher.stored(nodes)
        self._mark_used(node)
        return duplicates + trailing

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` unlocked pages, least recently used first; return the number."""
        nodes: list[Node] = []
        while len(nodes) < num_pages and self._evictable:
            node, _ = self._evictable.popitem(last=False)
            assert node.parent is not None
            del node.parent.children[node.key]
            node.parent = None
            nodes.append(node)
        freed = [node.page for node in nodes]
        self._held.difference_update(freed)
        if nodes and self.watcher is not None:
            self.watcher.removed(nodes, is_empty=not self._held)
        self._allocator.free(freed)
        return len(freed)

    def flush(self) -> int:
        """Free all unlocked pages and return their number."""
        return self.evict(self.num_evictable)

    def _key(self, tokens: Sequence[int], page: int) -> Key:
        start = page * self._page_size
        return tuple(tokens[start : start + self._page_size + self._lookahead])

    def _walk(self, tokens: Sequence[int], num_pages: int) -> tuple[Node, list[int]]:
        """Find the longest cached prefix up to ``num_pages``: its last node and its pages."""
        node = self._root
        pages: list[int] = []
        while len(pages) < num_pages:
            child = node.children.get(self._key(tokens, len(pages)))
            if child is None:
                break
            node = child
            pages.append(node.page)
        return node, pages

    def _upwards(self, node: Node) -> Iterator[Node]:
        """Yield ``node`` and all its ancestors except the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _mark_used(self, node: Node) -> None:
        """Move unlocked pages on the path to a node to the end of the queue, last page first."""
        for above in self._upwards(node):
            if above.locks == 0:
                self._evictable[above] = None
                self._evictable.move_to_end(above)
