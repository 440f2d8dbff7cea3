"""Text leaves the stream only when no later token can change it: whole characters, and no beginning of a stop
string."""

from __future__ import annotations

_REPLACEMENT = "\ufffd"  # what a decoder shows for the bytes of a character that is not complete yet


class TextStream:
    """Turns token ids into text piece by piece, in time linear in their number, and ends at a stop string."""

    def __init__(self, tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._start = self._read = 0  # the window's ids; those before `_read` are decoded already
        self._held = ""
        self.stopped = False  # whether a stop string has been found

    def push(self, token: int) -> str:
        """Text that is now certain. After a stop string it is what came before it, and `stopped` is set."""
        self._ids.append(token)
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        if after.endswith(_REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :], last=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters and beginnings of stop strings included."""
        before = self._decode(self._ids[self._start : self._read])
        after = self._decode(self._ids[self._start :])
        return "" if self.stopped else self._release(after[len(before) :], last=True)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""

    def _release(self, text: str, last: bool) -> str:
        self._held += text
        found = min((at for s in self._stop if (at := self._held.find(s)) >= 0), default=-1)
        if found >= 0:
            self.stopped = True
            text, self._held = self._held[:found], ""
            return text
        keep = (
            0
            if last
            else max((n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        )
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


_THINK = (("<think>", "</think>"), ("<|channel|>analysis<|message|>", "<|end|>"), ("<reasoning>", "</reasoning>"))


def split_reasoning(text: str, opened: bool = False) -> tuple[str, str]:
    """(reasoning, answer) of a reply, which may be unfinished.

    opened: the chat template has already opened the reasoning, so the reply starts inside it. A reply without reasoning
    has an empty first part.
    """
    for start, end in _THINK:
        body = text.lstrip()
        if body.startswith(start):
            inside = body[len(start) :]
        elif opened and (end in text or start == "<think>"):
            inside = text
        else:
            continue
        reasoning, found, answer = inside.partition(end)
        return reasoning.strip(), answer.lstrip() if found else ""
    return "", text


def template_opens_reasoning(prompt: str) -> bool:
    """Whether a rendered chat prompt ends inside an open reasoning tag."""
    return any(prompt.rstrip().endswith(start) for start, _ in _THINK)
