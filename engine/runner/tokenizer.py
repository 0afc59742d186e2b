"""A model directory's tokenizer: text to ids and back, chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.core.errors import RequestError
from engine.mistakes import reason_of
from engine.runner.byte_fallback import ByteFallback, Decode
from engine.weights.errors import ModelNotFound, UnsupportedModel

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


class TextTokenizer:
    """Wraps transformers' tokenizer of one directory."""

    def __init__(self, tokenizer: Any, name: str):
        self.name = name
        self.hf = tokenizer
        tokenizer.model_max_length = 10**9  # too long a prompt is refused by name, not warned about
        # The Rust tokenizer decodes ten times faster than its transformers wrapper.
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self.decode: Decode = self._slow_decode if fast is None else fast.decode
        self.fallback = None if fast is None else ByteFallback.of(fast)

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer puts around a prompt."""
        return list(self.hf(text)["input_ids"])

    def encode_chat(self, messages: Sequence[dict[str, Any]],
                    template: str | None = None) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers.

        RequestError if the model has no chat template, the template refuses the messages, or what
        it makes of them is no valid text.
        """
        if not isinstance(messages, (list, tuple)):
            raise RequestError(f"a conversation is a list of {{\"role\": …, \"content\": …}}, not "
                               f"{type(messages).__name__}")
        for number, message in enumerate(messages):
            if isinstance(message, dict) and not {"content", "tool_calls"} & set(message):
                raise RequestError(f"messages[{number}] has no \"content\": a message is "
                                   f"{{\"role\": …, \"content\": …}}, and this one has "
                                   f"{', '.join(map(str, message)) or 'nothing'}")
        if not (template or self.hf.chat_template):
            raise RequestError(f"{self.name} has no chat template: give chat_template=…, or a "
                               f"plain prompt to generate()")
        try:
            text = self.hf.apply_chat_template(
                list(messages), tokenize=False, chat_template=template, add_generation_prompt=True)
        except Exception as error:  # templates raise what they like
            raise RequestError(f"the chat template of {self.name} refuses these messages: {error}"
                               ) from None
        try:
            text.encode()  # the Rust tokenizer takes a lone surrogate for something that is no str
        except UnicodeEncodeError as error:
            raise RequestError(f"the messages are no valid text: a character "
                               f"{text[error.start:error.start + 1]!r} is in them") from None
        return list(self.hf(text, add_special_tokens=False)["input_ids"])

    def _slow_decode(self, ids: list[int]) -> str:
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(directory: Path) -> TextTokenizer | None:
    """The directory's tokenizer; None if it has none (token ids still work).

    ModelNotFound if its files cannot be read; UnsupportedModel if it is config.json, which
    transformers reads for it and is stricter about than we are.
    """
    if not any((directory / name).is_file() for name in FILES):
        return None
    from transformers import AutoTokenizer
    try:
        return TextTokenizer(AutoTokenizer.from_pretrained(str(directory)), directory.name)
    except Exception as error:  # a damaged file raises whatever its parser raises
        reason = reason_of(error)
        if reason == _refusal_of_config(directory):
            raise UnsupportedModel(f"{directory}/config.json: transformers, which loads the "
                                   f"tokenizer, refuses it: {reason}; correct that field") from None
        raise ModelNotFound(f"the tokenizer of {directory} cannot be read: {reason}") from None


def _refusal_of_config(directory: Path) -> str | None:
    """What transformers says of config.json alone; None: nothing."""
    from transformers import AutoConfig
    try:
        AutoConfig.from_pretrained(str(directory))
    except Exception as error:
        return reason_of(error)
    return None
