"""A conversation's KV cache is kept between requests, and a request reuses the part that gives the same tokens as a
fresh run.

What is reused of a cache that holds the ids C, its first P of them prefilled in aligned chunks:
- the new prompt begins with all of C (the next turn): everything, so that a turn costs its new tokens only;
- the new prompt is the last prompt (regenerate): everything up to the prompt's end, its logits too;
- else the common prefix, rounded down to a chunk border inside P: what follows is computed in the very chunks a fresh
  run would use, so the rounding, and with it every greedy token, is the same.
Layers that cannot be cropped (recurrent states, full sliding windows) are restored from copies made at the prompt's
end and at each chunk border.
"""

from __future__ import annotations

import copy

import torch

from engine.memory.kv import cache_bytes, layer_bytes


class Conversation:
    """The cache of the last request and what it holds. `chunk`: prefill chunk length in tokens."""

    def __init__(self, config, chunk: int) -> None:
        self._config, self.chunk = config, chunk
        self.forget()

    def forget(self) -> None:
        """Start empty."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self._config)
        self.ids: list[int] = []  # what the cache holds
        self.aligned = 0  # how many of them were prefilled in aligned chunks from the beginning
        self._prompt: list[int] = []
        self._logits: torch.Tensor | None = None
        self._copies: dict[int, dict[int, object]] = {}  # position -> layer index -> copy

    def resume(self, prompt: list[int], fresh: int = 0) -> torch.Tensor | None:
        """Make the cache a prefix of `prompt` that leaves its last `fresh` tokens to be prefilled.

        Returns the prompt's logits [1, V] when even they are known and `fresh` is 0, else None.
        """
        if not fresh and prompt == self._prompt and self._logits is not None and self._rewind(len(prompt)):
            return self._logits
        self._prompt, self._logits = [], None  # from here on the cache leaves the last prompt
        most = max(0, len(prompt) - max(1, fresh))
        if 0 < len(self.ids) <= most and prompt[: len(self.ids)] == self.ids:
            return None
        common = next((i for i, (a, b) in enumerate(zip(self.ids, prompt, strict=False)) if a != b),
                      min(len(self.ids), len(prompt)))  # fmt: skip
        keep = min(common, self.aligned, most) // self.chunk * self.chunk
        if keep == 0 or not self._rewind(keep):
            self.forget()
        return None

    def pieces(self, prompt: list[int]) -> list[list[int]]:
        """The chunks in which to prefill the rest of `prompt`, ending at multiples of `chunk`."""
        at, result = len(self.ids), []
        while at < len(prompt):
            end = min((at // self.chunk + 1) * self.chunk, len(prompt))
            result.append(prompt[at:end])
            at = end
        return result

    def append(self, ids: list[int], prefill: bool) -> None:
        """The cache has just taken in `ids`."""
        aligned = prefill and self.aligned == len(self.ids)
        self.ids.extend(ids)
        if aligned:
            self.aligned = len(self.ids)
        if prefill and len(self.ids) % self.chunk == 0:
            self._keep_copy()

    def bytes(self) -> int:
        """Bytes of the cache and of the copies."""
        return cache_bytes(self.cache) + sum(
            layer_bytes(layer) for layers in self._copies.values() for layer in layers.values()
        )

    def prompt_done(self, prompt: list[int], logits: torch.Tensor) -> None:
        """The whole prompt is in the cache and gave `logits` [1, V]."""
        self._prompt, self._logits = list(prompt), logits
        self._keep_copy()

    def mark(self) -> dict[int, object]:
        """What `take_back` needs beside the cache to come back to now: copies of the layers that a crop cannot put back."""
        return {i: copy.deepcopy(self.cache.layers[i]) for i in self._stiff()}

    def take_back(self, tokens: int, mark: dict[int, object]) -> None:
        """Make the cache forget the last `tokens` tokens, which were not appended; `mark` was made before the first."""
        if tokens:
            self._crop(tokens, mark)

    def settle(self, ahead: int, kept: int, mark: dict[int, object]) -> None:
        """Make the cache hold the appended tokens only: it holds `ahead` more.

        Layers that a crop cannot put back go to where `mark` was made, before the last `kept` appended tokens, which are
        forgotten too.
        """
        if ahead and mark:
            self._crop(ahead + kept, mark)
            self.ids = self.ids[: len(self.ids) - kept]
        elif ahead:
            self._crop(ahead, mark)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _stiff(self) -> list[int]:
        """Indices of layers that a crop cannot put back."""
        from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

        croppable = (DynamicLayer, DynamicIndexedLayer)
        return [i for i, layer in enumerate(self.cache.layers) if type(layer) not in croppable]

    def _keep_copy(self) -> None:
        stiff = self._stiff()
        if not stiff:
            return
        borders = [p for p in self._copies if p % self.chunk == 0][-1:]  # the prompt's end and the last border suffice
        self._copies = {p: self._copies[p] for p in borders}
        self._copies[len(self.ids)] = {i: copy.deepcopy(self.cache.layers[i]) for i in stiff}

    def _rewind(self, length: int) -> bool:
        """Crop the cache to its first `length` tokens; False when a layer cannot go back there."""
        extra, stiff = len(self.ids) - length, self._stiff()
        if extra and stiff and length not in self._copies:
            return False
        if extra:
            self._crop(extra, self._copies.get(length, {}))
        self.ids = self.ids[:length]
        self._copies = {position: layers for position, layers in self._copies.items() if position <= length}
        self.aligned = min(self.aligned, length)
        return True

    def _crop(self, extra: int, copies: dict[int, object]) -> None:
        """Take the last `extra` tokens out of the cache; `copies`, by layer, are of the layers that cannot be cropped."""
        for index, layer in enumerate(self.cache.layers):
            if index in copies:
                self.cache.layers[index] = copy.deepcopy(copies[index])
            else:
                layer.crop(-extra)
