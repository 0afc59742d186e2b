"""Words that `python -m engine` does not know: one sentence, not a box."""

import pytest

from engine.__main__ import main


@pytest.mark.parametrize("words, sentence", [
    (["--foo"], "No such option: --foo"), (["genrate"], "No such command 'genrate'"),
    (["generate", "--foo"], "No such option: --foo"), (["generate", "stray"], "(stray)"),
    (["bench", "--seed", "x"], "Invalid value for '--seed'")])
def test_a_word_that_is_not_known_is_one_sentence_with_the_way_to_help(
        words, sentence, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["engine", *words])
    assert main() == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert sentence in told.err and "--help lists what there is" in told.err
