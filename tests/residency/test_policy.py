"""The eviction score is the decayed count of uses, also of experts that are not used."""

from __future__ import annotations

import numpy as np

from engine.residency.policy import Lfru


def test_the_score_is_the_sum_of_decayed_uses():
    policy, uses = Lfru(1, 4, half_life=5), {0: [1, 2, 9], 1: [8], 3: [1, 1000]}
    for now in range(1, 1001):
        keys = [key for key, times in uses.items() if now in times]
        if keys:
            policy.touch(keys, now)
    for key, times in uses.items():
        wanted = np.log2(sum(2.0 ** ((t - 1000) / 5) for t in times)) + 1000 / 5
        assert np.isclose(policy.score[key], wanted)
    assert policy.score[2] == -np.inf


def test_the_victim_is_the_least_used_and_a_past_favourite_gives_way_in_time():
    policy = Lfru(1, 3, half_life=10)
    slots, key_of = np.array([0, 1]), np.array([0, 1])
    for now in range(1, 9):
        policy.touch([0], now)
    policy.touch([1], 9)
    assert policy.victim(slots, key_of) == 1  # eight uses outweigh one that is a little newer
    policy.touch([1], 60)
    assert policy.victim(slots, key_of) == 0  # but not one that is five half-lives newer


def test_only_candidates_are_chosen_and_an_expert_never_used_goes_first():
    policy, key_of = Lfru(1, 5, half_life=10), np.array([4, 3, 2])
    policy.touch([3, 4], 1)
    policy.touch([4], 2)
    assert policy.victim(np.array([0, 1]), key_of) == 1
    assert policy.victim(np.array([0, 1, 2]), key_of) == 2


def test_scores_stay_finite_and_exact_over_a_long_life():
    policy = Lfru(1, 2, half_life=3000)
    policy.touch([0, 1], 10**9)
    policy.touch([1], 10**9 + 1)
    assert np.isfinite(policy.score).all()
    assert policy.score[1] > policy.score[0]


def test_in_a_circle_of_layers_used_alike_a_cache_of_half_finds_almost_half():
    """Least recently used would find nothing: what it evicts is what the circle comes to next."""
    layers, slots = 10, 5
    policy, held, hits = Lfru(layers, 1, half_life=640), [], 0
    for now in range(1, 401):
        layer = (now - 1) % layers
        policy.at(layer)
        if layer in held:
            hits += now > 200
        else:
            if len(held) == slots:
                held.pop(policy.victim(np.arange(slots), np.array(held)))
            held.append(layer)
        policy.touch([layer], now)
    assert hits >= 0.4 * 200
