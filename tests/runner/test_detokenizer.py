"""Incremental text: whole characters only, stop strings wherever they fall, linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.runner.detokenizer import Detokenizer, StopFinder, TextStream

TEXTS = ["the cat sat on the mat", "naïve café — “quotes”", "日本語のテキスト",
         "emoji 🦊🐼👩‍👩‍👧 done",
         "\n\n  spaces\tand tabs  ", "مرحبا بالعالم", "a\u0301 combining", "x" * 40]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    """Byte-level BPE with few merges, so that characters come in several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    """A sentencepiece-like tokenizer with byte fallback, as Llama 2 and TinyLlama have."""
    pieces = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)],
              *["▁", "▁the", "▁cat", "s", "a", "t", "▁on", "é"]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[],
                                     byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    return tokenizer


def pieces_of(decode, prompt, output):
    detokenizer = Detokenizer(decode, prompt)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)), split=st.floats(0, 1))
def test_pieces_join_to_the_text_and_no_piece_holds_half_a_character(bpe, text, split):
    ids = bpe.encode(text).ids
    cut = int(len(ids) * split)
    pieces = pieces_of(bpe.decode, ids[:cut], ids[cut:])
    whole_prompt = bpe.decode(ids[:cut]).rstrip("\ufffd") if cut else ""
    if "\ufffd" not in text:
        assert whole_prompt + "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 319), max_size=80), st.integers(0, 8))
def test_any_ids_give_what_decoding_them_together_gives(bpe, ids, cut):
    text = "".join(pieces_of(bpe.decode, ids[:cut], ids[cut:]))
    prompt, together = bpe.decode(ids[:cut]), bpe.decode(ids)
    if together.startswith(prompt):
        assert prompt + text == together
    else:  # the output completed a character of the prompt
        assert together.endswith(text)
        assert prompt.startswith(together[:len(together) - len(text)])


def test_a_character_that_the_prompt_begins_comes_whole_with_the_output(bpe):
    ids = bpe.encode("ok 🦊!").ids
    for cut in range(1, len(ids)):
        shown = bpe.decode(ids[:cut]).rstrip("\ufffd")
        assert shown + "".join(pieces_of(bpe.decode, ids[:cut], ids[cut:])) == "ok 🦊!"


def test_a_character_that_the_prompt_begins_and_nobody_ends_is_not_part_of_the_output(bpe):
    half = bpe.encode("🦊").ids[:-1]
    assert "".join(pieces_of(bpe.decode, half, bpe.encode("the").ids)) == "the"
    assert pieces_of(bpe.decode, half, []) == [""]


def test_a_leading_space_after_a_prompt_is_kept_and_at_the_start_dropped(spm):
    words = [spm.token_to_id(piece) for piece in ("▁the", "▁cat", "s")]
    assert "".join(pieces_of(spm.decode, [], words)) == "the cats"
    assert "".join(pieces_of(spm.decode, words[:1], words[1:])) == " cats"


def test_byte_fallback_characters_come_whole(spm):
    fox = [spm.token_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    cat = spm.token_to_id("▁cat")
    assert pieces_of(spm.decode, [cat], [*fox, cat]) == ["", "", "", "🦊", " cat", ""]


def test_invalid_bytes_do_not_hold_the_text_back_for_ever(bpe):
    lone = bpe.encode("🦊").ids[-1]
    pieces = pieces_of(bpe.decode, [], [lone] * 200)
    assert "".join(pieces) == bpe.decode([lone] * 200)
    assert "".join(pieces[:100]) != ""


def test_special_tokens_have_no_text(bpe):
    the, end = bpe.encode("the").ids, bpe.token_to_id("<end>")
    assert "".join(pieces_of(bpe.decode, [], [*the, end, *the])) == "thethe"


@given(st.lists(st.one_of(st.integers(0, 319).map(lambda token: [token]),
                          st.integers(7, 70).map(lambda count: [0] * count)),  # 0 is <end>
                max_size=12).map(lambda parts: sum(parts, [])))
def test_many_special_tokens_push_out_no_context(bpe, ids):
    assert "".join(pieces_of(bpe.decode, [], ids)) == bpe.decode(ids)


def test_special_tokens_may_come_between_the_bytes_of_a_character(bpe):
    first, *rest = bpe.encode("🦊").ids
    assert pieces_of(bpe.decode, [], [first, *[0] * 99, *rest])[-2:] == ["🦊", ""]


def test_a_token_costs_the_same_early_and_late(bpe):
    lengths = []

    def counting(ids):
        lengths.append(len(ids))
        return bpe.decode(ids)

    pieces_of(counting, [], bpe.encode("the cat sat " * 500).ids)
    assert max(lengths) <= 16
    lengths.clear()
    pieces_of(counting, [], bpe.encode("🦊").ids[-1:] * 500)
    assert max(lengths) <= 64


# ------------------------------------------------------------------------------- stop strings

def cut_naively(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete, the longest on a tie."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[:end - len(stop)], stop
    return text, None


def feed(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    finder, shown = StopFinder(stops), []
    for piece in pieces:
        shown.append(finder.push(piece))
        if finder.found is not None:
            return shown, finder.found
    return [*shown, finder.flush()], None


@given(st.lists(st.text("ab\n", max_size=4), max_size=12),
       st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_earliest_complete_stop_string_cuts_the_text_whatever_the_pieces(pieces, stops):
    shown, found = feed(pieces, stops)
    expected, stop = cut_naively("".join(pieces), stops)
    assert ("".join(shown), found) == (expected, stop)


@given(st.lists(st.text("ab", max_size=3), max_size=10),
       st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_become_a_stop_string(pieces, stops):
    finder, text = StopFinder(stops), ""
    for piece in pieces:
        text += piece
        finder.push(piece)
        if finder.found is not None:
            return
        longest = max(len(stop) for stop in stops)
        assert len(finder.held) < longest
        assert not finder.held or any(stop.startswith(finder.held) for stop in stops)


class Letters:
    """A tokenizer whose token n is the n-th piece."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def stream(self, stops=(), **options) -> TextStream:
        decode = lambda ids: "".join(self.pieces[n] for n in ids)  # noqa: E731
        return TextStream(Detokenizer(decode), StopFinder(stops), **options)


@pytest.mark.parametrize("include, text", [(False, "one "), (True, "one END")])
def test_a_stop_string_across_three_tokens(include, text):
    letters = Letters("one ", "E", "N", "D two")
    stream = letters.stream(["END"], include_stop=include)
    shown = [stream.push(n) for n in range(4)]
    assert "".join(shown) == stream.text == text
    assert shown[1:3] == ["", ""]
    assert stream.stop == "END" and stream.finish() == ""


def test_text_held_back_for_a_stop_string_comes_out_when_it_does_not_complete():
    stream = Letters("a", "E", "N", "x", "E").stream(["END"])
    assert [stream.push(n) for n in range(5)] == ["a", "", "", "ENx", ""]
    assert stream.finish() == "E"
    assert stream.text == "aENxE"


def test_min_tokens_lets_early_stop_strings_pass():
    stream = Letters("END", "a", "END").stream(["END"], unchecked=2)
    assert [stream.push(n) for n in range(3)] == ["END", "a", ""]
    assert stream.stop == "END" and stream.text == "ENDa"


def test_a_stop_string_may_begin_within_min_tokens_and_end_after():
    stream = Letters("a", "EN", "D").stream(["END"], unchecked=2)
    assert [stream.push(n) for n in range(3)] == ["a", "", ""]
    assert stream.stop == "END" and stream.text == "a"


def test_a_stop_string_that_min_tokens_let_pass_is_not_found_in_a_longer_one_that_is_held_back():
    stream = Letters("xab", "d", "xab", "c").stream(["ab", "xabc"], unchecked=1)
    assert [stream.push(n) for n in range(3)] == ["", "xabd", "x"]
    assert stream.stop == "ab" and stream.text == "xabdx"


@given(st.lists(st.text("ab", max_size=3), max_size=10),
       st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 6))
def test_with_min_tokens_a_stop_string_counts_if_it_ends_after_them(pieces, stops, unchecked):
    text, early = "".join(pieces), len("".join(pieces[:unchecked]))
    expected = text, None
    for end in range(early + 1, len(text) + 1):
        if done := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(done, key=len)
            expected = text[:end - len(stop)], stop
            break
    stream = Letters(*pieces).stream(stops, unchecked=unchecked)
    for token in range(len(pieces)):
        stream.push(token)
        if stream.stop:
            break
    stream.finish()
    assert (stream.text, stream.stop) == expected


def test_every_stop_string_of_real_text_is_found(bpe):
    text = "".join(TEXTS)
    ids = bpe.encode(text).ids
    for stop in ("sat", "“quotes”", "日本", "👩‍👧", "\n\n", " spaces\t", "x" * 40):
        stream = TextStream(Detokenizer(bpe.decode), StopFinder([stop]))
        for token in ids:
            stream.push(token)
            if stream.stop:
                break
        assert stream.text == re.split(re.escape(stop), text, maxsplit=1)[0]
