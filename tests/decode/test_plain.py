"""A forward gives the logits that were asked for, from rows that the vocabulary's product can take as they lie."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from engine.decode.plain import forward
from engine.decode.reuse import Conversation
from tests.streaming import reference

IDS = [5, 9, 2, 7, 11]


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "bailing_hybrid"])
@pytest.mark.parametrize("every", [False, True])
def test_logits_are_those_of_plain_rows(checkpoint, kind, every):
    model, seen = reference(checkpoint(kind)), []
    wanted = model(torch.tensor([IDS])).logits[0]
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = forward(model, Conversation(model.config, 8), IDS, every)
    hook.remove()
    assert_close(logits, wanted if every else wanted[-1:])
    # A slice would be called contiguous too, but a product of one row of it reorders all of the vocabulary's weights first.
    assert [rows.stride() for rows in seen] == [torch.empty(rows.shape).stride() for rows in seen]
