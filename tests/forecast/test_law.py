"""A routing law is found by asking the router, and then routes as it does."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from engine.forecast.law import RoutingLaw, find_law
from engine.model.router import as_routing
from engine.model.skeleton import find_experts, find_router, top_k
from tests.streaming import reference
from tests.tiny_models import CONFIGS

LAWS = {
    "mixtral": ("softmax", True), "qwen2_moe": ("softmax", True), "qwen3_5_moe": ("softmax", True),
    "qwen3_moe": ("softmax", False), "olmoe": ("softmax", False), "gpt_oss": ("softmax", True),
    "granitemoeshared": ("softmax", True), "deepseek_v3": ("sigmoid", True), "glm4_moe": ("sigmoid", True),
    "bailing_hybrid": ("sigmoid", True),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAWS)
def test_the_law_is_the_routers(kind, checkpoint):
    model = reference(checkpoint(kind))
    experts = next(iter(find_experts(model)))
    router, k = model.get_submodule(find_router(model, experts)), top_k(model, experts)
    law = find_law(router, 64, k, kind)
    assert (law.scoring, law.normalise) == LAWS[kind]
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        own = as_routing(router(x))
    ids, weights = law.select(own.logits, getattr(router, "e_score_correction_bias", None))
    dense = [
        torch.zeros(own.logits.shape).scatter_(-1, i, w.float()) for i, w in ((ids, weights), (own.ids, own.weights))
    ]
    torch.testing.assert_close(*dense, rtol=1e-3, atol=1e-3)


def test_a_group_that_is_worth_less_is_left_out():
    law = RoutingLaw("sigmoid", 2, True, scale=2.5, groups=2, kept_groups=1)
    ids, weights = law.select(torch.tensor([[3.0, -9.0, 2.0, 2.0]]))  # the best expert is in the worse group
    assert sorted(ids[0].tolist()) == [2, 3]
    torch.testing.assert_close(weights, torch.full((1, 2), 1.25))


def test_a_softmax_of_the_chosen_is_the_share_of_their_scores():
    logits = torch.randn(7, 9)
    ids, weights = RoutingLaw("softmax", 3, True).select(logits)
    scores = logits.softmax(-1).gather(-1, ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - LAWS.keys()))
def test_every_other_router_has_a_law_or_is_refused(kind, checkpoint):
    model = reference(checkpoint(kind))
    experts = next(iter(find_experts(model)))
    router = model.get_submodule(find_router(model, experts))
    try:
        law = find_law(router, 64, top_k(model, experts), kind)
    except ConfigError as error:
        assert kind in str(error) and "on-demand" in str(error)
    else:
        assert law.scoring in ("softmax", "sigmoid")
