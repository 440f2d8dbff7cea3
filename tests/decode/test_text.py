"""The streamed text is the decoded whole, comes in whole characters, and never shows any of a stop string."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine.decode.text import TextStream, split_reasoning, template_opens_reasoning
from tests.tiny_models import write_tokenizer

TEXTS = [
    "plain text, two words",
    "naïve café — “quoted”",
    "专家在需要之前就已从磁盘读出。",
    "🚀 rockets 👩‍👩‍👧‍👦 families 🇨🇭 flags",
    "नमस्ते, 한국어, עברית",
    "def f(x):\n    return  x\t# tab\n\n",
    "",
    "�",
]


def byte_level(directory) -> PreTrainedTokenizerFast:
    write_tokenizer(directory)
    return AutoTokenizer.from_pretrained(directory)


def word_level(directory) -> PreTrainedTokenizerFast:
    """As sentencepiece does it: a mark for the space before a word, bytes for what it does not know."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "▁plain",
        "▁text",
        ",",
        "▁two",
        "▁words",
        "▁",
        "s",
    ]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module", params=[byte_level, word_level])
def tokenizer(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tokenizer"))


def stream(tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """The pieces, the last by `finish`, and whether a stop string ended them."""
    text, pieces = TextStream(tokenizer, stop), []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.finish()], text.stopped


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_whole(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, stopped = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert not stopped
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_a_character_comes_when_its_last_byte_does(tmp_path):
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("a🚀b", add_special_tokens=False)
    assert stream(tokenizer, ids)[0] == ["a", "", "", "", "🚀", "b", ""]


@pytest.mark.parametrize("seed", range(5))
def test_any_bytes_at_all(tmp_path, seed):
    """A model may say bytes that are no text: shown as the decoder shows them, nothing lost or twice."""
    tokenizer = byte_level(tmp_path)
    special = set(tokenizer.all_special_ids)
    ids = [i for i in random.Random(seed).choices(range(len(tokenizer)), k=80) if i not in special]
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_an_unfinished_character_is_shown_at_the_end(tmp_path):
    tokenizer = byte_level(tmp_path)
    pieces, _ = stream(tokenizer, tokenizer.encode("a🚀", add_special_tokens=False)[:-1])
    assert pieces[:4] == ["a", "", "", ""]
    assert pieces[-1] == "�"


def test_special_tokens_are_not_text_and_the_space_after_them_is(tokenizer):
    ids = tokenizer.encode("plain text", add_special_tokens=False)
    more = tokenizer.encode(" two words", add_special_tokens=False)
    pieces, _ = stream(tokenizer, [*ids, tokenizer.eos_token_id, tokenizer.bos_token_id, *more])
    assert "".join(pieces) == tokenizer.decode([*ids, *more])


# -- stop strings ----------------------------------------------------------------------------------------------------


def letters() -> PreTrainedTokenizerFast:
    """Tokens of one to three letters a, b, c."""
    words = [x + y + z for x in "abc" for y in ["", *"abc"] for z in ["", *"abc"]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(dict.fromkeys(words))}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def first_end(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


def test_a_stop_string_over_any_token_borders():
    tokenizer, choice = letters(), random.Random(0)
    for _ in range(400):
        ids = choice.choices(range(len(tokenizer)), k=choice.randint(1, 12))
        stop = tuple("".join(choice.choices("abc", k=choice.randint(1, 4))) for _ in range(choice.randint(1, 3)))
        whole = tokenizer.decode(ids)
        pieces, stopped = stream(tokenizer, ids, stop)
        assert "".join(pieces) == first_end(whole, stop)
        assert stopped == any(s in whole for s in stop)


def test_what_may_become_a_stop_string_is_held_back_and_only_that(tmp_path):
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("Hi\nUs all\nUser: no", add_special_tokens=False)
    pieces, stopped = stream(tokenizer, ids, ("\nUser:",))
    assert ("".join(pieces), stopped) == ("Hi\nUs all", True)
    assert "".join(pieces[:3]) == "Hi"  # the line break waits
    assert pieces[-1] == ""


def test_a_beginning_of_a_stop_string_is_shown_when_the_reply_ends_with_it(tmp_path):
    tokenizer = byte_level(tmp_path)
    ids = tokenizer.encode("a STO", add_special_tokens=False)
    pieces, stopped = stream(tokenizer, ids, ("STOP",))
    assert ("".join(pieces), stopped) == ("a STO", False)
    assert "".join(pieces[:-1]) == "a "


# -- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("just an answer", False, ("", "just an answer")),
        ("<think>\nhm\n</think>\n\nso", False, ("hm", "so")),
        ("\n<think>hm</think>so", False, ("hm", "so")),
        ("<think>hm, not don", False, ("hm, not don", "")),
        ("hm</think>so", True, ("hm", "so")),
        ("hm, not don", True, ("hm, not don", "")),
        ("hm</reasoning>so", True, ("hm", "so")),
        ("<reasoning>hm</reasoning>so", False, ("hm", "so")),
        ("an answer with <think> in it", False, ("", "an answer with <think> in it")),
        ("<think></think>so", False, ("", "so")),
        ("<|channel|>analysis<|message|>hm", False, ("hm", "")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>fin", False, ("hm", "")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so", False, ("hm", "so")),
        ("<|channel|>final<|message|>so", False, ("", "so")),
        ("", True, ("", "")),
        ("", False, ("", "")),
    ],
)
def test_reasoning_is_told_from_the_answer(text, opened, expected):
    assert split_reasoning(text, opened) == expected


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [("<|assistant|><think>\n", True), ("<|assistant|>", False), ("<think>\n</think>\n", False), ("", False)],
)
def test_a_template_that_opens_the_reasoning(prompt, opens):
    assert template_opens_reasoning(prompt) == opens


def test_special_tokens_that_mark_reasoning_are_kept(tmp_path):
    tokenizer = byte_level(tmp_path)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|channel|>", "<|message|>", "<|end|>", "<|call|>"]})
    said = "<|channel|>analysis<|message|>hm<|end|><|call|>"
    pieces, _ = stream(tokenizer, tokenizer.encode(said, add_special_tokens=False))
    assert "".join(pieces) == "<|channel|>analysis<|message|>hm<|end|>"
    assert split_reasoning("".join(pieces)) == ("hm", "")
