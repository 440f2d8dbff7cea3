"""Text leaves the stream only when no later token can change it: whole characters, and no beginning of a stop
string."""

from __future__ import annotations

_REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of a character that is not complete yet

# How reasoning begins and ends in a reply, and what goes before the answer where something does.
_THINK = (
    ("<think>", "</think>", ""),
    ("<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>"),
    ("<reasoning>", "</reasoning>", ""),
)
# Special tokens that are part of the text nevertheless: without them reasoning could not be told from the answer.
_MARKS = {"<think>", "</think>", "<reasoning>", "</reasoning>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>"}


class TextStream:
    """Turns token ids into text piece by piece, in time linear in their number, and ends at a stop string.

    The stop string whose end comes first counts, so that it does not matter how the text falls into tokens.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        added = tokenizer.added_tokens_decoder.items()
        self._hidden = {token for token, entry in added if entry.special and entry.content not in _MARKS}
        self._ids: list[int] = []
        self._start = self._read = 0  # the window's ids; those before `_read` are decoded already
        self._held = ""
        self.stopped = False  # whether a stop string has been found

    def push(self, token: int) -> str:
        """Text that is now certain. After a stop string it is what came before it, and `stopped` is set."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._unread()
        if text.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(text, last=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters and beginnings of stop strings included."""
        return "" if self.stopped else self._release(self._unread(), last=True)

    def _unread(self) -> str:
        """Text of the ids from `_read` on, decoded behind those before: a decoder may join words with what precedes."""
        before = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""

    def _release(self, text: str, last: bool) -> str:
        self._held += text
        places = [(at + len(s), at) for s in self._stop if (at := self._held.find(s)) >= 0]
        if places:
            self.stopped = True
            text, self._held = self._held[: min(places)[1]], ""
            return text
        if last:
            keep = 0
        else:  # the longest beginning of a stop string that the text ends with
            keep = max((n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """(reasoning, answer) of a reply, which may be unfinished.

    opened: the chat template has already opened the reasoning, so the reply starts inside it. A reply without reasoning
    has an empty first part.
    """
    body = text.lstrip()
    for start, end, answer_start in _THINK:
        if body.startswith(start):
            return _split(body[len(start) :], end, answer_start)
        if answer_start and body.startswith(answer_start):
            return "", body[len(answer_start) :]
    if opened:
        return _split(text, *next((marks[1:] for marks in _THINK if marks[1] in text), _THINK[0][1:]))
    return "", text


def _split(text: str, end: str, answer_start: str) -> tuple[str, str]:
    reasoning, _, answer = text.partition(end)
    if answer_start:
        answer = answer.partition(answer_start)[2]
    return reasoning.strip(), answer.lstrip()


def template_opens_reasoning(prompt: str) -> bool:
    """Whether a rendered chat prompt ends inside an open reasoning tag."""
    return prompt.rstrip().endswith(tuple(start for start, _, _ in _THINK))
