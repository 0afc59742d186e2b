"""The log of an engine that is called several times, idle in between: its replay is identical."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.core.errors import RequestError
from engine.core.events import read_log
from simulator.replay import replay

SETTINGS = dict(max_model_len=48, num_kv_blocks=14, block_size=4, max_num_seqs=4)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_calls_refusals_and_dropped_streams_are_replayed_identically(overlap, tmp_path):
    path = tmp_path / "run.jsonl"
    with LLM("tiny", overlap=overlap, log=path, **SETTINGS) as llm:
        for call in range(4):
            llm.generate([[7, 8, 9 + call]] * 2, SHORT)
            with pytest.raises(RequestError, match="max_model_len"):
                llm.generate([[9] * 500], SHORT)
            stream = llm.stream([[5, 6, 7 + call], [1, 2, 3, 4]], LONG)
            for _ in range(3 * call):
                next(stream)
            stream.close()
            llm.engine.abort("nobody")
            assert call != 2 or llm.engine.scheduler.reset_prefix_cache()
    log = read_log(path)
    kinds = [event["e"] for event in log.events]
    assert kinds.count("reject") == 4 and kinds.count("reset") == 1
    assert "abort" in {event["reason"] for event in log.events if event["e"] == "finish"}
    report = replay(log)
    assert report.identical, report.difference
    assert report.note is None and report.events == len(log.events)
