"""Byte fallback (Llama 2, Mistral, Gemma): text while it comes equals decoding all at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine import SamplingParams
from engine.core.request import Request
from engine.outputs import Timings
from engine.runner.byte_fallback import HALF, ByteFallback
from engine.runner.detokenizer import Detokenizer, StopFinder, TextStream
from engine.runner.session import Session
from engine.runner.tokenizer import TextTokenizer

WORDS = ["▁", "▁the", "▁cat", "s", "é", "日", "▁▁", "\ufffd"]
STRIPS = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
          decoders.Strip(" ", 1, 0)]  # Llama 2's; Gemma's has no Strip


def tokenizer_with(decoder) -> Tokenizer:
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], *WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[],
                                     byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


llama = tokenizer_with(decoders.Sequence(STRIPS))
gemma = tokenizer_with(decoders.Sequence(STRIPS[:-1]))
END, UNKNOWN = llama.token_to_id("</s>"), 5000
tokenizers = st.sampled_from([llama, gemma])


FALLBACKS = [(tokenizer, ByteFallback.of(tokenizer)) for tokenizer in (llama, gemma)]


def fallback_of(tokenizer) -> ByteFallback:
    return next(fallback for other, fallback in FALLBACKS if other is tokenizer)


def run(text: str | bytes) -> list[int]:
    """The byte tokens of a text."""
    return [1 + byte for byte in (text.encode() if isinstance(text, str) else text)]


def word(piece: str) -> int:
    return llama.token_to_id(piece)


def pieces_of(tokenizer, prompt, output):
    detokenizer = Detokenizer(tokenizer.decode, prompt, fallback_of(tokenizer))
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


any_token = st.one_of(st.integers(0, 256 + len(WORDS) + 2), st.just(UNKNOWN))
any_ids = st.lists(st.one_of(
    st.lists(any_token, max_size=3),
    st.text(max_size=8).map(run),  # UTF-8
    st.binary(max_size=4).map(run),  # mostly not
    st.integers(7, 20).map(lambda count: [END] * count),
    st.lists(st.sampled_from([word(piece) for piece in WORDS]), max_size=20)),
    max_size=8).map(lambda parts: sum(parts, []))


@given(tokenizers, any_ids)
@example(llama, run("🦊🐼"))
@example(llama, run("\n") + run(b"\xff") + [word("▁the")])
@example(llama, [*run("🦊")[:2], END, *run("🦊")[2:], UNKNOWN, *run("é"), word("s")])
@example(llama, [word("s"), *[END] * 30, word("▁the")])
@example(llama, [word("▁"), *[END] * 30, word("▁the")])
@example(llama, run(b"\xff" * 30 + b"a" * 30) + [word("s")])
def test_any_ids_give_what_decoding_them_together_gives(tokenizer, ids):
    assert "".join(pieces_of(tokenizer, [], ids)) == tokenizer.decode(ids)


@given(tokenizers, any_ids, any_ids)
@example(llama, [word("s")], [word("▁the")])
@example(llama, [word("s"), *[END] * 30], [word("▁the")])
def test_what_follows_a_prompt_that_leaves_no_run_open(tokenizer, prompt, output):
    prompt = [*prompt, word("s")]
    text = "".join(pieces_of(tokenizer, prompt, output))
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)


@given(tokenizers, any_ids, st.text(max_size=6), st.integers(0, 24))
def test_a_prompt_may_end_anywhere_in_a_run(tokenizer, before, text, cut):
    ids = [*before, word("s"), *run(text), word("▁cat")]
    at = max(len(ids) - 1 - cut, len(before) + 1)
    shown = tokenizer.decode(ids[:at])
    if at < len(ids) - 1:  # of a run cut in two, whole characters belong to the prompt
        whole = bytes(token - 1 for token in ids[len(before) + 1:at]).decode(errors="ignore")
        shown = tokenizer.decode(ids[:len(before) + 1]) + whole
    assert shown + "".join(pieces_of(tokenizer, ids[:at], ids[at:])) == tokenizer.decode(ids)


some_bytes = st.one_of(st.binary(max_size=5), st.text(max_size=3).map(str.encode))


@given(tokenizers, some_bytes, some_bytes, st.booleans())
def test_an_open_run_of_the_prompt_goes_on_by_characters_or_by_signs(
        tokenizer, prompt, output, closed):
    together, ids = prompt + output, run(output) + closed * [word("s")]
    try:
        expected = together.decode()[len(prompt.decode(errors="ignore")):]
    except UnicodeDecodeError:
        expected = HALF * len(output)
    text = "".join(pieces_of(tokenizer, [word("s"), *run(prompt)], ids))
    assert text == expected + closed * "s"


def test_a_byte_that_breaks_the_prompts_run_gives_one_sign_a_byte_of_the_output():
    assert pieces_of(llama, run("日"), run(b"\xe6") + [word("s")]) == ["", HALF + "s", ""]
    assert pieces_of(llama, run(b"\xe6"), run(b"\x97")) == ["", HALF]
    assert pieces_of(llama, run(b"a\xff"), run(b"b")) == [HALF, ""]
    assert pieces_of(llama, run("日"), []) == [""]


@given(tokenizers, st.lists(st.one_of(st.text().map(run), st.just([word("▁the")])), max_size=9))
def test_no_piece_holds_half_a_character(tokenizer, parts):
    ids = sum(parts, [])
    text = tokenizer.decode(ids)
    pieces = pieces_of(tokenizer, [], ids)
    assert "".join(pieces) == text
    assert sum(HALF in piece for piece in pieces) <= text.count(HALF)


def test_a_run_comes_with_its_end_and_a_broken_one_at_once():
    ids = [word("▁cat"), *run("日本"), word("s"), *run(b"a\xffbc"), word("s")]
    assert pieces_of(llama, [], ids) == [
        "cat", *[""] * 6, "日本s", "", HALF * 2, HALF, HALF, "s", ""]


@pytest.mark.parametrize("ids", [run("日本" * 2000), run(b"\xff" * 9000), run(b"ab\xff" * 3000),
                                 run("a" * 9000) + [word("s")], [END] * 9000,
                                 [*run("日"), *[END] * 9000]])
def test_thousands_of_byte_tokens_cost_the_same_a_token(ids):
    lengths = []

    def counting(tokens):
        lengths.append(len(tokens))
        return llama.decode(tokens)

    detokenizer = Detokenizer(counting, [], ByteFallback(counting, ByteFallback.of(llama).byte_of))
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == llama.decode(ids)
    assert sum(lengths) <= 16 * len(ids)


def test_tokenizers_that_treat_no_token_so_have_no_fallback():
    literal = tokenizer_with(decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()]))
    assert ByteFallback.of(literal).byte_of == {}
    assert ByteFallback.of(Tokenizer(models.BPE())).byte_of == {}
    assert ByteFallback.of(llama).byte_of[word("<0x0A>")] == 10


def test_the_engines_sequences_know_their_tokenizers_byte_tokens():
    tokenizer = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=llama), "llama")
    request = Request("1", [word("▁cat")], SamplingParams(max_tokens=99))
    session = Session(request, "1", 0, tokenizer, Timings(0.0))
    for number, token in enumerate(run("🦊🐼") + [word("▁the")], start=1):
        session.push(token, number, 0.0, None)
    assert session.output().text == "🦊🐼 the"


# ------------------------------------------------------------------------------- stop strings

def stream(stops, **options) -> TextStream:
    return TextStream(Detokenizer(llama.decode, [], fallback_of(llama)), StopFinder(stops),
                      **options)


def stopped_naively(ids, stops, unchecked):
    """Decode all so far at every token: (tokens used, text); a stop string must end after the
    characters that the unchecked tokens gave."""
    passed = 0
    for count in range(1, len(ids) + 1):
        text = llama.decode(ids[:count])
        if count <= unchecked:
            passed = len(text)
            continue
        ends = [(at + len(stop), at) for stop in stops
                if (at := text.find(stop, max(passed + 1 - len(stop), 0))) >= 0]
        if ends:
            return count, text[:min(ends)[1]]
    return len(ids), llama.decode(ids)


def test_a_newline_byte_stops_the_text_at_once():
    text = stream(["\n"])
    assert [text.push(token) for token in [word("▁cat"), *run("\n")]] == ["cat", ""]
    assert (text.stop, text.text) == ("\n", "cat")


def test_newlines_of_min_tokens_in_an_open_run_do_not_stop_it_later():
    text = stream(["\n"], unchecked=2)
    shown = [text.push(token) for token in [*run("\n\n"), word("s"), *run("a\n")]]
    assert "".join(shown) == text.text == "\n\nsa" and text.stop == "\n"


@given(st.lists(st.sampled_from([run("\n"), run("ab"), run("é"), run("日"), [word("s")], [END],
                                 [word("▁")]]), max_size=8),
       st.lists(st.sampled_from(["\n", "\ns", "ab", "bé", "s", "é\n", "日", " ", "日日 "]),
                min_size=1, max_size=3), st.integers(0, 8))
@example([run("\n"), run("\n"), [word("s")]], ["\n"], 1)
def test_stop_strings_of_bytes_end_the_text_with_the_token_that_completes_them(
        parts, stops, unchecked):
    ids = [word("▁cat"), *sum(parts, [])]
    text = stream(stops, unchecked=unchecked)
    count = 0
    for token in ids:
        text.push(token)
        count += 1
        if text.stop is not None:
            break
    text.finish()
    expected = stopped_naively(ids, stops, unchecked)
    if HALF not in "".join(llama.decode(ids[:unchecked])):  # signs count otherwise than characters
        assert (count, text.text) == expected
