"""Keys and values of prompt prefixes, by token ids: a radix tree per weight load, bounded, least recently used leaves go first.

A node holds a run of tokens and their keys and values; a path from the root spells a prefix that was computed. The
weights are part of the key: `flush` names the load whose keys may enter, and everything older is gone (numerics 3).
Payloads are arrays (torch or numpy) whose second-to-last axis is tokens; they are copies, never views of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Payload = Any


class Node:
    """A run of tokens below its parent."""

    __slots__ = ("children", "parent", "payload", "tokens", "used")

    def __init__(self, tokens: list[int], payload: Payload, parent: Node | None, used: int) -> None:
        self.tokens = tokens
        self.payload = payload
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.used = used
        """Tick of the last match or insertion."""


def _common(run: list[int], tokens: Sequence[int], start: int) -> int:
    """How many tokens of `run` agree with tokens[start:]."""
    length = min(len(run), len(tokens) - start)
    if run[:length] == list(tokens[start : start + length]):
        return length
    return next(i for i in range(length) if run[i] != tokens[start + i])


class PrefixCache:
    """`max_tokens` bounds what is held; 0 switches it off. `copy` makes a payload's slice independent of its source."""

    def __init__(self, max_tokens: int, copy: Callable[[Payload], Payload]) -> None:
        self.max_tokens = max_tokens
        self.tokens = 0
        self.epoch = -1
        self._copy = copy
        self._tick = 0
        self._root = Node([], None, None, 0)

    def flush(self, epoch: int) -> None:
        """Forget everything; from now on only keys of weight load `epoch` enter."""
        self.epoch = epoch
        self.tokens = 0
        self._root = Node([], None, None, 0)

    def match(self, tokens: Sequence[int], limit: int) -> list[tuple[int, int, Payload]]:
        """The longest cached prefix of tokens[:limit] as consecutive (start, end, payload of exactly these tokens)."""
        self._tick += 1
        node, start = self._root, 0
        found: list[tuple[int, int, Payload]] = []
        while start < limit and (child := node.children.get(tokens[start])) is not None:
            length = min(_common(child.tokens, tokens, start), limit - start)
            child.used = self._tick
            payload = child.payload if length == len(child.tokens) else child.payload[..., :length, :]
            found.append((start, start + length, payload))
            start += length
            if length < len(child.tokens):
                break
            node = child
        return found

    def insert(self, tokens: Sequence[int], epoch: int, read: Callable[[int, int], Payload]) -> int:
        """Hold the keys of `tokens`, reading only those that are missing. Returns how many entered; 0 for another load's keys."""
        if epoch != self.epoch or len(tokens) > self.max_tokens:
            return 0
        self._tick += 1
        node, start = self._root, 0
        while start < len(tokens) and (child := node.children.get(tokens[start])) is not None:
            length = _common(child.tokens, tokens, start)
            if length < len(child.tokens):
                child = self._split(child, length)
            child.used = self._tick
            node, start = child, start + length
        added = len(tokens) - start
        if added:
            leaf = Node(list(tokens[start:]), self._copy(read(start, len(tokens))), node, self._tick)
            node.children[tokens[start]] = leaf
            self.tokens += added
            self._evict()
        return added

    def _split(self, node: Node, length: int) -> Node:
        """Cut a run in two; returns the upper part, which takes the node's place."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:length], self._copy(node.payload[..., :length, :]), parent, node.used)
        parent.children[node.tokens[0]] = upper
        node.payload = self._copy(node.payload[..., length:, :])
        node.tokens = node.tokens[length:]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _evict(self) -> None:
        # A little below the bound, so that the tree is not walked at every insertion. The path just inserted stays.
        target = self.max_tokens - self.max_tokens // 10
        while self.tokens > self.max_tokens:
            for leaf in sorted(self._leaves(), key=lambda node: node.used):
                if self.tokens <= target or leaf.used == self._tick:
                    break
                assert leaf.parent is not None
                del leaf.parent.children[leaf.tokens[0]]
                self.tokens -= len(leaf.tokens)

    def _leaves(self) -> list[Node]:
        leaves: list[Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves
