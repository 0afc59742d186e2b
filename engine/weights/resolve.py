"""From what a user calls a model to a directory on this machine."""

from __future__ import annotations

from pathlib import Path

from engine.cache import cache_dir
from engine.weights.errors import ModelNotFound

TINY = Path(__file__).parent / "tiny"
PULLABLE = ("smollm2",)  # names that `python -m engine pull` can fetch
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def pulled_dir(name: str) -> Path:
    """The directory of a pulled model, whether it is there or not."""
    return cache_dir() / "models" / name


def resolve_model(name: str | Path) -> Path:
    """The model's directory. `name` is `tiny`, a pulled model, a directory, or a hub id.

    ModelNotFound with the known names and the way out if there is no such model here.
    """
    text = str(name)
    if not text.strip():
        raise ModelNotFound(f"the model is empty: give a known name ({known_names()}), a directory "
                            f"or a hub id like owner/name")
    if text == "tiny":
        return TINY
    if text in PULLABLE:
        directory = pulled_dir(text)
        if not (directory / "config.json").is_file():
            raise ModelNotFound(
                f"{text} is not on this machine yet: run `python -m engine pull {text}`"
            )
        return directory
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # too long, of nobody's home, a byte no path has
        pass
    if text.count("/") == 1 and not text.startswith((".", "/", "~")):
        return _from_hub(text)
    raise ModelNotFound(
        f"model {text!r} is neither a known name ({known_names()}) nor a directory "
        f"nor a hub id like owner/name"
    )


def known_names() -> str:
    return ", ".join(("tiny", *PULLABLE))


def _from_hub(repo: str) -> Path:
    """A hub snapshot, from the local cache if it is there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise ModelNotFound(
            f"model {repo!r} would come from the Hugging Face hub, which needs "
            f"`pip install huggingface_hub`; known without it: {known_names()}"
        ) from None
    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    except Exception as error:  # a malformed id raises its own class
        raise ModelNotFound(f"model {repo!r}: {_first_line(error)}") from None
    try:
        return Path(snapshot_download(repo, allow_patterns=HUB_FILES))
    except Exception as error:  # offline, gated, absent: the hub has a dozen classes for it
        raise ModelNotFound(
            f"model {repo!r} is no directory here and the Hugging Face hub did not "
            f"give it ({_first_line(error)}); known without the hub: "
            f"{known_names()}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
