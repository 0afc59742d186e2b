"""What every command line of the lab says of a user's mistake: one sentence, with the way out.

Of files that cannot be used, and of words that the parser does not know. The standard library only.
"""

from __future__ import annotations

import errno
import gzip
import os
import signal
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED = 130  # the exit status after a Ctrl-C

# What opening and reading a user's file can raise.
FILE_ERRORS = (OSError, UnicodeDecodeError, EOFError, zlib.error)


def file_sentence(error: BaseException, path: str | Path | None = None, want: str = "") -> str:
    """One of FILE_ERRORS in words: which file, what is wrong with it, what to do. `path` is the
    file, where the error does not name it; `want` what should have been given: "a trace"."""
    name = str(path or getattr(error, "filename", None) or "the file")
    give = f"give {want}" if want else "choose another file"
    if isinstance(error, UnicodeDecodeError):
        if b"\0" in error.object[:4096]:
            return f"{name} is a binary file, not text: {give}"
        return (f"{name} is not UTF-8 text (a byte 0x{error.object[error.start]:02x} stands where "
                f"none can): save it as UTF-8, or {give}")
    if isinstance(error, EOFError):
        return f"{name} is a gzip file whose end is missing: copy or download it again"
    if isinstance(error, (gzip.BadGzipFile, zlib.error)):
        return f"{name} is a damaged gzip file: copy or download it again"
    if not isinstance(error, OSError):
        return f"{name} cannot be read: {give}"
    return f"{name} {_reason(error, Path(name), want)}"


def _reason(error: OSError, path: Path, want: str) -> str:
    number = error.errno
    if number == errno.ENOENT:
        if not path.parent.is_dir():
            return f"is not there, nor is the folder {path.parent}: check the path, or create it"
        return "does not exist: check the path" + (f"; it should be {want}" if want else "")
    if number in (errno.EISDIR, errno.EEXIST) and path.is_dir():
        return "is a folder: name a file in it"
    if number == errno.ENOTDIR:
        return "cannot be: a part of that path is a file, not a folder"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "is not open to you: change its permissions, or choose another place"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "cannot be written, because the disk is full: free some space, or choose another"
    why = os.strerror(number).lower() if number else str(error)
    return f"cannot be used ({why}): choose another file"


def shorten(text: str, most: int = 120) -> str:
    """A text to be read in one breath: beyond `most` characters its beginning and end alone."""
    if len(text) <= most:
        return text
    return f"{text[:most * 2 // 3]} … {text[-(most // 3):]}"


def reason_of(error: BaseException) -> str:
    """What another library's error says first, in one line: its class where it says nothing. A line
    that ends in a colon only announces the next; a KeyError's text comes in quotes."""
    quoted = isinstance(error, KeyError) and len(error.args) == 1
    text = str(error.args[0]) if quoted else str(error)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    end = next((place for place, line in enumerate(lines) if not line.endswith(":")), len(lines))
    said = shorten(" ".join(lines[:end + 1]), 400).rstrip(".")
    return said or type(error).__name__


def read_text(path: str | Path, want: str, wrong: type[Exception]) -> str:
    """A user's UTF-8 text file that is not empty. `wrong`, with one sentence, if it is none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FILE_ERRORS as error:
        raise wrong(file_sentence(error, path, want)) from None
    if "\0" in text[:4096]:
        raise wrong(f"{path} is a binary file, not text: give {want}")
    if not text.strip():
        raise wrong(f"{path} is empty: give {want}")
    return text


def warn_in_one_line() -> None:
    """From now on a warning is a sentence on stderr, without the line of code that gave it."""
    def show(message, category, filename, lineno, file=None, line=None) -> None:
        print(f"warning: {message}", file=sys.stderr)
    warnings.showwarning = show


def leave_if_interrupted() -> None:
    """From now on, until hear_interrupts(), a Ctrl-C is the end, without a word: the libraries are
    still being imported, and a traceback from the middle of one says nothing. Where it is ignored,
    as in the background of a script, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def hear_interrupts() -> None:
    """A Ctrl-C is a KeyboardInterrupt again: to be called where that is caught."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: Any) -> NoReturn:
    os._exit(INTERRUPTED)


def usage_sentence(error: Exception) -> str | None:
    """The parser's complaint (an option that does not exist, a value of the wrong type) as one
    sentence, or its help where nothing was asked for; None if it is no complaint of the parser."""
    context, say = getattr(error, "ctx", None), getattr(error, "format_message", None)
    if say is None:
        return None
    sentence = " ".join(say().split()) if type(error).__name__ != "NoArgsIsHelpError" else say()
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        return sentence
    return f"{sentence.rstrip('.')}: {context.command_path} --help lists what there is"
