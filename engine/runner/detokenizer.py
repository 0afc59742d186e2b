"""Token ids to text while they come: never half a character, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Decode = Callable[[list[int]], str]

HALF = "\ufffd"  # what decoders put for bytes that are no character (yet)
MOST_HALF = 3  # bytes of an unfinished UTF-8 character: no more replacement signs than that
OVERLAP = 6  # tokens kept as context when the window moves on
WINDOW = 16  # tokens decoded together: then it moves on, if no character is unfinished
LONGEST_WINDOW = 64  # then it moves on anyway: such text is no text


class Detokenizer:
    """The text of one sequence, token by token, in constant time a token.

    Decoders need context (a leading space may be dropped, bytes of one character may come in
    several tokens), so the last few tokens are decoded together each time and the part already
    given out is cut off. Replacement signs at the end may still become a character; they wait.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()):
        """The text continues `prompt`, of which nothing is given out again, but for a character
        that the prompt begins and the output completes."""
        self._decode = decode
        self._window = list(prompt[-OVERLAP:])
        text = decode(self._window) if self._window else ""
        self._given = self._whole(text)
        self._prompts_half = len(text) - self._given  # replacement signs that are the prompt's

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        self._window.append(token)
        text = self._decode(self._window)
        end = self._whole(text)
        new = self._without_prompt(text[self._given:end])
        self._given = max(self._given, end)
        if len(self._window) >= (WINDOW if end == len(text) else LONGEST_WINDOW):
            waiting = len(text) - end
            del self._window[:-OVERLAP - waiting]
            self._given = max(len(self._decode(self._window)) - waiting, 0)
        return new

    def flush(self) -> str:
        """What still waits, as it stands: nothing more will come."""
        text = self._decode(self._window)
        new = self._without_prompt(text[self._given:])
        self._given = len(text)
        return new

    def _without_prompt(self, new: str) -> str:
        """Drop what the prompt's own half character left, unless it has become a whole one."""
        while self._prompts_half and new:
            if new[0] != HALF:
                self._prompts_half = 0
                break
            self._prompts_half -= 1
            new = new[1:]
        return new

    @staticmethod
    def _whole(text: str) -> int:
        """Number of characters that later tokens cannot change."""
        end, least = len(text), len(text) - MOST_HALF
        while end > max(least, 0) and text[end - 1] == HALF:
            end -= 1
        return end


class StopFinder:
    """Finds the first stop string to be completed, and holds back text that may become one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self.held = ""  # the longest end of the text so far that begins a stop string
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The part of all text so far, not yet given out, that no stop string can claim. Once
        `found` is set: the text before it, and `held` is the stop string itself."""
        text = self.held + text
        ends = [(at + len(stop), -len(stop), stop)
                for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self.held = self.found
            return text[:end - len(self.found)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        text, self.held = self.held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


@dataclass(slots=True)
class TextStream:
    """One sequence's text with its stop strings: what may be shown, and whether it is over."""

    detokenizer: Detokenizer
    finder: StopFinder
    include_stop: bool = False  # the stop string itself belongs to the text
    unchecked: int = 0  # the first so many tokens complete no stop string (min_tokens)
    pieces: list[str] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self.finder.found

    @property
    def text(self) -> str:
        """All text given out."""
        if len(self.pieces) > 1:
            self.pieces[:] = ["".join(self.pieces)]
        return self.pieces[0] if self.pieces else ""

    def push(self, token: int) -> str:
        """The text to show for one more token."""
        self.num_tokens += 1
        return self._give(self.detokenizer.push(token), self.num_tokens <= self.unchecked)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.stop is not None:
            return ""
        rest = self.finder.flush() + self.detokenizer.flush()
        self.pieces.append(rest)
        return rest

    def _give(self, text: str, unchecked: bool) -> str:
        if not text:
            return ""
        if self.finder.stops and not unchecked:
            text = self.finder.push(text)
            if self.stop is not None and self.include_stop:
                text += self.finder.held
        self.pieces.append(text)
        return text
