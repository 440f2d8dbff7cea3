"""The next token is a function of logits, history and a seeded generator; the filters are transformers' own."""

from __future__ import annotations

import torch

from engine.config import GenerationConfig


class Sampler:
    """Chooses tokens as `config` says; greedy when its temperature is 0."""

    def __init__(self, config: GenerationConfig, device: torch.device) -> None:
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.greedy = config.temperature == 0
        self.processors = LogitsProcessorList()
        if config.repetition_penalty != 1:
            self.processors.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        if not self.greedy:
            if config.temperature != 1:
                self.processors.append(TemperatureLogitsWarper(float(config.temperature)))
            if config.top_k:
                self.processors.append(TopKLogitsWarper(config.top_k))
            if config.top_p < 1:
                self.processors.append(TopPLogitsWarper(config.top_p))
            if config.min_p > 0:
                self.processors.append(MinPLogitsWarper(config.min_p))
        self.generator = torch.Generator(device)
        if config.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(config.seed)

    def probabilities(self, logits: torch.Tensor, history: list[int]) -> torch.Tensor:
        """logits [1, V] -> probabilities [1, V] fp32 after all filters."""
        return torch.softmax(self._scores(logits, history), dim=-1)

    def accept(self, p: torch.Tensor, q: torch.Tensor, token: int) -> bool:
        """Whether a `token` drawn from q [1, V] may stand as one drawn from p [1, V]: with probability min(1, p / q)
        (Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, section 2.3)."""
        return float(torch.rand(1, generator=self.generator, device=p.device)) * float(q[0, token]) < float(p[0, token])

    def instead(self, p: torch.Tensor, q: torch.Tensor) -> int:
        """The token in place of one from q that p did not accept: drawn from the normalised positive part of p - q."""
        left = (p - q).clamp_min(0)
        return self.draw(left if float(left.sum()) > 0 else p)  # nothing is left only where rounding made p and q equal

    def draw(self, weights: torch.Tensor) -> int:
        """A token id drawn in proportion to `weights` [1, V]."""
        return int(torch.multinomial(weights, 1, generator=self.generator))

    @torch.inference_mode()
    def propose(self, logits: torch.Tensor, history: list[int]) -> tuple[int, torch.Tensor]:
        """A token for draft logits [1, V], and the distribution [1, V] that it was drawn from, or is the likeliest of."""
        q = self.probabilities(logits, history)
        if not bool(torch.isfinite(q).all()):  # of a damaged draft: anything may be proposed, it is verified
            q = torch.full_like(q, 1 / q.shape[-1])
        return int(q.argmax(dim=-1)) if self.greedy else self.draw(q), q

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, history: list[int]) -> int:
        """The next token id for logits [1, V]; `history` holds all token ids before it."""
        if self.greedy:
            return int(self._scores(logits, history).argmax(dim=-1))
        return self.draw(self.probabilities(logits, history))

    def _scores(self, logits: torch.Tensor, history: list[int]) -> torch.Tensor:
        scores = logits.float()
        if not self.processors:
            return scores
        return self.processors(torch.tensor([history], device=logits.device), scores)
