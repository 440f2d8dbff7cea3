"""What streaming is measured against: computing and reading at once."""

from __future__ import annotations

import pytest

from engine.bench.stream import Both


def test_what_is_left_when_one_of_both_has_ended_has_the_machine_to_itself():
    both = Both(alone=1.0, beside=2.0, bandwidth=50.0)
    assert both.seconds(0, raw=100.0) == 1.0
    assert both.seconds(50, raw=100.0) == pytest.approx(1 + 0.5 * 1.0)  # half computed meanwhile, the other half alone
    assert both.seconds(200, raw=100.0) == pytest.approx(2 + 100 / 100)  # 100 bytes meanwhile, the others alone
