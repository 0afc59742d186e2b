"""Token ids to text while they come: never half a character, and nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runner.byte_fallback import HALF, ByteFallback, ByteRun, Decode

MOST_HALF = 3  # bytes of an unfinished UTF-8 character: no more replacement signs than that
OVERLAP = 6  # tokens kept as context when the window moves on
WINDOW = 16  # tokens decoded together: then it moves on, if no character is unfinished
LONGEST_WINDOW = 64  # then it moves on anyway: such text is no text


class Detokenizer:
    """The text of one sequence, token by token, in constant time a token.

    Decoders need context (a leading space may be dropped, bytes of one character may come in
    several tokens), so the last few tokens are decoded together each time and the part already
    given out is cut off. Replacement signs at the end may still become a character; they wait.
    A run of byte fallback tokens waits for its end, undecoded, or for the byte that breaks it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = (),
                 fallback: ByteFallback | None = None):
        """The text continues `prompt`, of which nothing is given out again, but for a character
        that the prompt begins and the output completes."""
        self._decode = decode
        self._fallback = fallback if fallback and fallback.byte_of else None
        self._run: ByteRun | None = None
        start, run = self._open_run(prompt)
        self._window, self._text = self._context(prompt, start)
        self._given = self._whole(self._text)
        self._prompts_half = len(self._text) - self._given  # replacement signs of the prompt
        if run:
            self._continue(run)

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        if self._fallback is not None:
            byte = self._fallback.byte_of.get(token)
            if byte is not None:
                return self._push_byte(token, byte)
            if self._run is not None and self._fallback.skips(token):
                return ""
            self._given, self._run = self._given_of_run(), None
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and self._is_silent(token):
            self._window.pop()  # many of them would push out the context
            return ""
        self._text, end = text, self._whole(text)
        new = self._without_prompt(text[self._given:end])
        self._given = max(self._given, end)
        if len(self._window) >= (WINDOW if end == len(text) else LONGEST_WINDOW):
            self._move_on(len(text) - end)
        return new

    def flush(self) -> str:
        """What still waits, as it stands, if nothing more comes."""
        return self._without_prompt(self._decode(self._window)[self._given_of_run():])

    @property
    def waiting(self) -> list[str]:
        """Whole characters that only wait for the run of bytes they are in to end well."""
        return [] if self._run is None or self._run.broken else self._run.whole

    def _push_byte(self, token: int, byte: int) -> str:
        run = self._run
        if run is None:
            run = self._run = ByteRun(len(self._window), self._given)
        if run.broken:
            return HALF
        self._window.append(token)
        run.push(byte)
        return self._break(run) if run.broken else ""

    def _break(self, run: ByteRun) -> str:
        """The signs of a run that just broke. One byte that never is a character takes the place
        of the run in the window."""
        assert self._fallback is not None
        new = self._decode(self._window)[run.given_if_broken:]
        byte_of = self._fallback.byte_of
        wrong = next(token for token in self._window[run.at:] if byte_of[token] >= 0x80)
        self._window[run.at:] = [wrong]
        self._text = self._decode(self._window)
        self._given = len(self._text)
        return new

    def _given_of_run(self) -> int:
        """Characters given out of the window's text, if the run ends here."""
        run = self._run
        if run is None or run.broken or not run.num_unfinished:
            return self._given
        return run.given_if_broken

    def _open_run(self, prompt: Sequence[int]) -> tuple[int, list[int]]:
        """Where the run of byte tokens begins that the prompt leaves open, and its tokens."""
        start, run = len(prompt), []
        if self._fallback is not None:
            for at in range(len(prompt) - 1, -1, -1):
                if prompt[at] in self._fallback.byte_of:
                    start = at
                    run.append(prompt[at])
                elif not self._fallback.skips(prompt[at]):
                    break
        return start, run[::-1]

    def _continue(self, tokens: list[int]) -> None:
        """Go on with a run of the prompt: its whole characters, or its signs, are given."""
        assert self._fallback is not None
        run = self._run = ByteRun(len(self._window), self._given + len(tokens))
        self._window += tokens
        for token in tokens:
            run.push(self._fallback.byte_of[token])
            if run.broken:
                self._break(run)
                return
        run.whole.clear()
        self._given = len(self._decode(self._window[:len(self._window) - run.num_unfinished]))

    def _context(self, prompt: Sequence[int], end: int) -> tuple[list[int], str]:
        """The tokens before `end` that the output's text depends on, and their text."""
        size = OVERLAP
        while True:
            window = list(prompt[max(end - size, 0):end])
            text = self._decode(window) if window else ""
            if text or size >= end:
                return window, text
            size *= 2  # special tokens only: the last text is before them

    def _move_on(self, waiting: int) -> None:
        window = self._window[-OVERLAP - waiting:]
        if text := self._decode(window):  # else a leading space would look like the first one
            self._window, self._text = window, text
            self._given = max(len(text) - waiting, 0)

    def _is_silent(self, token: int) -> bool:
        """True if `token`, the window's last, which added nothing, never adds anything. A space
        at the start of all text looks so once."""
        return not self._decode([token]) and bool(self._text or token in self._window[:-1])

    def _without_prompt(self, new: str) -> str:
        """Drop what the prompt's own half character left, unless it has become a whole one."""
        while self._prompts_half and new:
            if new[0] != HALF:
                self._prompts_half = 0
                break
            self._prompts_half -= 1
            new = new[1:]
        return new

    def _whole(self, text: str) -> int:
        """Number of characters that later tokens cannot change."""
        end, least = len(text), len(text) - MOST_HALF
        if self._fallback is not None:
            return end  # bytes wait as a run; other signs are what they are
        while end > max(least, 0) and text[end - 1] == HALF:
            end -= 1
        return end


class StopFinder:
    """Finds the first stop string to be completed, and holds back text that may become one."""

    def __init__(self, stops: Sequence[str]):
        self.stops = tuple(stops)
        self._longest = max(map(len, self.stops), default=0)
        self.held = ""  # the longest end of the text so far that begins a stop string
        self.found: str | None = None

    def push(self, text: str, passed: int = 0) -> str:
        """The part of all text so far, not yet given out, that no stop string can claim. Once
        `found` is set: the text before it, and `held` is the stop string itself. Stop strings
        that end in the first `passed` characters of `text` do not count."""
        passed += len(self.held)  # what ends there was looked at before
        text = self.held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self.stops
                if (at := text.find(stop, max(passed + 1 - len(stop), 0))) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self.held = self.found
            return text[:end - len(self.found)]
        keep = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def would_end(self, characters: Sequence[str]) -> bool:
        """True if a stop string ends with the last of `characters`, were they pushed."""
        return (self.held + "".join(characters[-self._longest:])).endswith(self.stops)

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
    unchecked: int = 0  # the first so many tokens complete no stop string, but may begin one
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
        if not self.finder.stops:
            return self._give(self.detokenizer.push(token))
        looked_at = self.detokenizer.waiting
        num_looked_at = len(looked_at)
        text = self.detokenizer.push(token)
        if self.num_tokens <= self.unchecked:
            return self._give(self.finder.push(text, len(text)))
        if len(self.detokenizer.waiting) > num_looked_at and (rest := self._ending()):
            return self._give_checked(rest, len(rest) - 1)
        if not text:
            return ""
        came = text.startswith("".join(looked_at))  # or else a wrong byte made signs of them
        return self._give_checked(text, num_looked_at if came else 0)

    def finish(self) -> str:
        """The rest of the text, when no token follows."""
        if self.stop is not None:
            return ""
        rest = self.finder.flush() + self.detokenizer.flush()
        self.pieces.append(rest)
        return rest

    def _ending(self) -> str:
        """The characters that wait in a run of bytes, if a stop string ends with the last one:
        with that the run is over. Else none."""
        if not self.finder.would_end(self.detokenizer.waiting):
            return ""
        rest = self.detokenizer.flush()  # decoders may have dropped its leading space
        return rest if self.finder.would_end(rest) else ""

    def _give_checked(self, text: str, passed: int) -> str:
        text = self.finder.push(text, passed)
        if self.stop is not None and self.include_stop:
            text += self.finder.held
        return self._give(text)

    def _give(self, text: str) -> str:
        if text:
            self.pieces.append(text)
        return text
