"""An expert that is missing on the device is computed where it lies, in host memory, if that ends sooner than its copy.

Both are measured: seconds a copy from the link's meter, seconds on the processor from the products themselves. Missing experts
are dealt out one by one to whichever side ends it sooner, while the device computes those it holds (Kamahori et al., "Fiddler:
CPU-GPU orchestration for fast inference of mixture-of-experts models", 2024, section 3, decides for each expert alone). What
was computed here is copied afterwards when the link has nothing else to do, so that the slots follow what is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.kernels.expert import ExpertKernel
from engine.residency.tier import Tier

_LAST = 2**60  # urgency of a copy that nobody waits for
_NEWEST = 0.1  # weight of the newest measurement


class Costs:
    """Seconds that an expert takes on the processor for so many tokens; `probe(tokens)` measures what was never done."""

    def __init__(self, probe: Callable[[int], float]) -> None:
        self._probe = probe
        self._seconds: dict[int, float] = {}  # by the tokens' number, rounded up to a power of two

    def of(self, tokens: int) -> float:
        size = (tokens - 1).bit_length()
        if size not in self._seconds:
            self._seconds[size] = self._probe(2**size)
        return self._seconds[size]

    def learn(self, counts: list[int], seconds: float) -> None:
        """Experts of counts[i] tokens each took `seconds` together."""
        off = seconds / sum(map(self.of, counts)) - 1
        for size in {(tokens - 1).bit_length() for tokens in counts}:
            self._seconds[size] *= 1 + _NEWEST * off


def deal(counts: dict[int, int], cost: Callable[[int], float], copy_s: float, link_s: float) -> list[int]:
    """Those of the missing experts, key -> tokens, that the processor ends sooner than the link, which is free after link_s."""
    here, processor_s = [], 0.0
    for key in sorted(counts, key=counts.get):  # those of few tokens first: the processor suits them best
        if processor_s + cost(counts[key]) < link_s + copy_s:
            here.append(key)
            processor_s += cost(counts[key])
        else:
            link_s += copy_s
    return here


class HostExperts:
    """Computes experts from the slots of the host tier below the device tier `tier`.

    kernel: computes from those slots; finish: what the model does after an expert's second projection, on the device.
    always: whatever it costs.
    """

    def __init__(self, tier: Tier, kernel: ExpertKernel, finish: Callable[[torch.Tensor], torch.Tensor], hidden: int,
                 always: bool) -> None:  # fmt: skip
        self.tier, self.host = tier, tier.fetcher.host
        self._kernel, self._finish, self._hidden, self._always = kernel, finish, hidden, always
        self._dtype = torch.bfloat16
        self._costs = Costs(self._probe)
        tier.begins = False  # a fetch begun as soon as the routing is known could not be left out any more

    def choose(self, counts: dict[int, int]) -> list[int]:
        """Of the experts that a layer is about to run, key -> tokens, those to `compute` here."""
        missing = self.tier.missing(list(counts))
        if self._always or not missing:
            return missing
        copy_s = self.tier.fetch_s
        if not copy_s:
            return []  # what a copy takes is not known before the first
        link_s = self.tier.fetcher.under_way * copy_s
        return deal({key: counts[key] for key in missing}, self._costs.of, copy_s, link_s)

    def compute(self, keys: list[int], x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """x [sum of counts, H] on the device -> the same there: counts[i] rows in turn by expert keys[i]."""
        self.tier.elsewhere(keys)
        rows = dict(zip(keys, x.to("cpu").split(counts), strict=True))
        self._dtype = x.dtype
        parts: dict[int, torch.Tensor] = {}
        for batch in self.host.lease(keys):
            here = [key for key, _ in batch]
            sizes = [len(rows[key]) for key in here]
            began = time.perf_counter()
            out = self._kernel([slot for _, slot in batch], torch.cat([rows[key] for key in here]), sizes)
            self._costs.learn(sizes, time.perf_counter() - began)
            parts |= zip(here, out.split(sizes), strict=True)
        if not self.tier.fetcher.busy:
            self.tier.prefetch(keys, self.tier.clock + self.tier.layers, _LAST)
        return self._finish(torch.cat([parts[key] for key in keys]).to(x.device))

    def _probe(self, tokens: int) -> float:
        """Seconds of one expert for so many tokens, whatever its slot holds: the second time, when it is warm."""
        x = torch.zeros(tokens, self._hidden, dtype=self._dtype)
        for _ in range(2):
            began = time.perf_counter()
            self._kernel([0], x, [tokens])
        return time.perf_counter() - began
