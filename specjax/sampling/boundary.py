"""The place in a completion where its grammar begins: an automaton over the tokens before it.

The automaton comes from the format of the model's reasoning. It follows the text, and each drafted
branch on its own. It also limits the reasoning to a number of tokens, with or without a grammar.
"""

import math
from typing import NamedTuple

import numpy as np

BEGIN = -1  # the state in which the grammar begins
Place = tuple[int, float]  # the state, and the number of tokens of reasoning that are left


class Boundary(NamedTuple):
    """The automaton's states and edges.

    Attributes:
        edges: state, token and next state.
        others: for each state, the next one after any other token.
        end: the token that ends the reasoning.
        inside: the state in which tokens are reasoning.
        first: the state before the completion.
        budget: maximum number of tokens of reasoning, after which ``end`` is forced.
        barred: state and token that may not follow once the budget is used up.
    """

    edges: tuple[tuple[int, int, int], ...]
    others: tuple[int, ...]
    end: int
    inside: int
    first: int = 0
    budget: int | None = None
    barred: tuple[tuple[int, int], ...] = ()


class BoundaryWalk:
    """Goes through the places of a :class:`Boundary`."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._edges = {(state, token): after for state, token, after in boundary.edges}
        self.start: Place = boundary.first, math.inf if boundary.budget is None else boundary.budget

    def next(self, place: Place, token: int) -> Place:
        """The place after a token; fewer than 0 tokens are left if the budget does not allow it."""
        state, left = place
        after = self._edges.get((state, token), self._boundary.others[state])
        return after, left - (state == after == self._boundary.inside)

    def limit(self, place: Place, mask: np.ndarray, forced: np.ndarray) -> None:
        """Write the mask i32 ``[V / 32]`` and the forced tokens i32 ``[1 + S]`` of a place."""
        mask[:] = forced[:] = -1
        if place[1] > 0:
            return
        bits, end = mask.view(np.uint8), self._boundary.end
        if place[0] == self._boundary.inside:
            mask[:], forced[0] = 0, end
            bits[end // 8] = 1 << end % 8
        for state, token in self._boundary.barred:
            if state == place[0]:
                bits[token // 8] &= ~(1 << token % 8) & 0xFF
