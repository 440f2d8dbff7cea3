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

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, history: list[int]) -> int:
        """The next token id for logits [1, V]; `history` holds all token ids before it."""
        if self.greedy:
            return int(self._scores(logits, history).argmax(dim=-1))
        return int(torch.multinomial(self.probabilities(logits, history), 1, generator=self.generator))

    def _scores(self, logits: torch.Tensor, history: list[int]) -> torch.Tensor:
        scores = logits.float()
        if not self.processors:
            return scores
        return self.processors(torch.tensor([history], device=logits.device), scores)
