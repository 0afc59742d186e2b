"""What the core cannot know of a request and of a step: the model's vocabulary and tokenizer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from engine.core.batch import RowFailed
from engine.core.errors import RequestError
from engine.core.request import Request
from engine.runner.model_runner import StepOutput
from engine.runner.tokenizer import TextTokenizer


def check_tokens(request: Request, vocab_size: int, tokenizer: TextTokenizer | None) -> None:
    """RequestError if the request names a token that there is not, or needs text where there is
    none."""
    params = request.params
    for what, ids in (("token id", request.tokens or ()),
                      ("stop token id", params.stop_token_ids),
                      ("logit_bias id", [token for token, _ in params.logit_bias])):
        wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(f"request {request.id}: {what} {wrong} is outside the "
                               f"vocabulary of {vocab_size} tokens")
    if params.stop and tokenizer is None:
        raise RequestError(f"request {request.id}: stop strings need a tokenizer, and the "
                           f"model directory has none: use stop_token_ids")


def within(output: StepOutput, vocab_size: int) -> StepOutput:
    """The output; a token that the vocabulary does not have fails its row."""
    tokens: list[Any] = output.tokens
    with suppress(TypeError, ValueError):  # some rows brought no token; there are no rows
        if min(tokens) >= 0 and max(tokens) < vocab_size:
            return output
    return replace(output, tokens=[
        RowFailed(f"the model returned token {token}, its vocabulary has {vocab_size}")
        if isinstance(token, int) and not 0 <= token < vocab_size else token for token in tokens])
