"""Traces: each published form, content shared rightly, every bad row named by file and line."""

from __future__ import annotations

import gzip
import json

import pytest

from simulator.errors import WorkloadError
from simulator.sources import make_workload
from simulator.traces import read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def columns(work):
    return list(zip(work.at, work.prompts, work.outputs))


def test_azure_2023_times_are_exact_to_100_ns_and_start_at_0(tmp_path):
    path = write(tmp_path, AZURE + "2023-11-16 23:59:59.9999999,374,44\n"
                                   "2023-11-17 00:00:01.0000001,396,109\n")
    work = read_trace(path)
    assert columns(work) == [(0.0, 374, 44), (pytest.approx(1.0000002, abs=1e-9), 396, 109)]


def test_azure_2024_times_with_a_zone_are_read(tmp_path):
    path = write(tmp_path, AZURE + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
                                   "2024-05-10 00:00:00.017335+00:00,2399,6\n")
    assert read_trace(path).at[1] == pytest.approx(0.007405, abs=1e-9)


@pytest.mark.parametrize("text", [
    "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,395,112\n0.5,10,3\n",  # Vidur
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,395,112,507,API log\n5.5,GPT-4,10,3,13,API log\n",  # BurstGPT
    "at,prompt,output\n7,395,112\n7.5,10,3\n\n"])
def test_vidur_burstgpt_and_plain_columns_are_known(tmp_path, text):
    assert columns(read_trace(write(tmp_path, text))) == [(0.0, 395, 112), (0.5, 10, 3)]


def test_columns_of_other_names_can_be_named(tmp_path):
    path = write(tmp_path, "when,inn,out\n1,2,3\n")
    with pytest.raises(WorkloadError, match="trace.csv:1: no column for 'at': found when, inn, "
                                            "out; wanted one of timestamp.*--columns at=NAME"):
        read_trace(path)
    work = read_trace(path, columns={"at": "when", "prompt": "inn", "output": "out"})
    assert columns(work) == [(0.0, 2, 3)]


@pytest.mark.parametrize("row, words", [
    ("2023-11-16 18:15:50.1,x,3", "ContextTokens='x' is not a whole number"),
    ("2023-11-16 18:15:50.1,0,3", "ContextTokens=0 must be a whole number from 1 to"),
    ("2023-11-16 18:15:50.1,5,9999999999", "GeneratedTokens=9999999999 must be"),
    ("2023-11-16 18:15:50.1,5,-3", "GeneratedTokens=-3 must be"),
    ("2023-11-16 18:15:50.1,5,2.5", "GeneratedTokens='2.5' is not a whole number"),
    ("yesterday,5,3", "TIMESTAMP='yesterday' is neither seconds nor a time"),
    ("nan,5,3", "TIMESTAMP='nan' is neither"),
    ("5,5,3", "'5' is a time of another kind than the first one: give all in seconds, or all with"),
    ("1,5", "has 2 fields, the header 3")])
def test_a_bad_row_names_file_line_and_way_out_or_is_left_out_with_a_note(tmp_path, row, words):
    path = write(tmp_path, AZURE + "2023-11-16 18:15:46.6,374,44\n" + row + "\n")
    with pytest.raises(WorkloadError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:3: {words}")
    assert "--skip-bad-rows" in str(error.value)
    work = read_trace(path, skip_bad=True)
    assert len(work) == 1 and "1 bad rows left out" in work.notes[0] and ":3:" in work.notes[0]


def test_rows_out_of_order_are_sorted_with_a_note_that_names_the_first(tmp_path):
    work = read_trace(write(tmp_path, "at,prompt,output\n5,1,1\n2,2,2\n9,3,3\n"))
    assert columns(work) == [(0.0, 2, 2), (3.0, 1, 1), (7.0, 3, 3)]
    assert "trace.csv:3: arrives before the row above it" in work.notes[0]


@pytest.mark.parametrize("text, words", [
    ("", "is empty"), (AZURE, "holds no request"), ("\x00", "no column")])
def test_a_trace_without_requests_is_named(tmp_path, text, words):
    with pytest.raises(WorkloadError, match=words):
        read_trace(write(tmp_path, text))


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.csv.gz", "t.jsonl.gz"])
def test_a_gzipped_trace_is_read_whatever_its_name(tmp_path, name):
    text = "at,prompt,output\n0,10,1\n4,20,2\n" if "csv" in name else "".join(
        json.dumps({"timestamp": t * 1000, "input_length": p, "output_length": o}) + "\n"
        for t, p, o in ((0, 10, 1), (4, 20, 2)))
    whole = gzip.compress(text.encode())
    (tmp_path / name).write_bytes(whole)
    assert columns(read_trace(tmp_path / name)) == [(0.0, 10, 1), (4.0, 20, 2)]
    (tmp_path / name).write_bytes(whole[:-9])
    with pytest.raises(WorkloadError, match="a gzip file whose end is missing"):
        read_trace(tmp_path / name)


@pytest.mark.parametrize("first, second, apart", [
    ("2023-11-16 18:15:46+02:00", "2023-11-16T17:15:47.5Z", 3601.5),
    ("2023-11-16 18:15:46.25-0530", "2023-11-16 23:45:47.25", 1.0),  # without a zone: UTC
    ("2023-11-16T23:59:59.9999999+00", "2023-11-17 01:00:00.0000001+01:00", 2e-7),
    ("2023-11-16", "2023-11-16 00:01", 60.0)])
def test_times_of_several_zones_are_told_apart(tmp_path, first, second, apart):
    for rows in ((first, second), (second, first)):
        work = read_trace(write(tmp_path, AZURE + "".join(f"{at},5,3\n" for at in rows)))
        assert work.at[1] == pytest.approx(apart, abs=1e-8)
        assert bool(work.notes) == (rows[0] == second)


@pytest.mark.parametrize("time", [
    "2023-11-16 18:15:99", "2023-11-16 18:15:60", "2023-11-16 18:15:46+25:00", "2023-11-16 25:15:1",
    "2023-13-16 18:15:46", "2023-11-16 18:15:46.6 nonsense", "2023-11-16 18:15:46-", "9" * 400,
    "x" * 100_000])
def test_what_is_no_time_is_a_short_sentence(tmp_path, time):
    with pytest.raises(WorkloadError, match=":2: TIMESTAMP=.* is neither seconds nor a time") as no:
        read_trace(write(tmp_path, AZURE + f"{time},5,3\n"))
    assert len(str(no.value)) < 500


@pytest.mark.parametrize("bad, words", [
    ('{"timestamp": ' + "9" * 400 + ', "input_length": 1, "output_length": 1}', "is not a number"),
    ('{"timestamp": ' + "9" * 5000 + ', "input_length": 1, "output_length": 1}', "of digits"),
    ('{"timestamp": 1, "input_length": ' + "9" * 400 + ', "output_length": 1}', "must be a whole"),
    ('{"timestamp": 1, "input_length": ["' + "9" * 4000 + '"], "output_length": 1}', "not a whole"),
    ('{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "timestamp=inf is not a"),
    ('{"timestamp": null, "input_length": 1, "output_length": 1}', "timestamp=None is not a"),
    ("[" * 100_000, "lists within lists"), ('{"a":' * 100_000, "lists within lists"),
    ("{" + ", ".join(f'"key{n}": 1' for n in range(9999)) + "}", "wanted timestamp")])
def test_whatever_a_json_line_holds_it_is_a_short_sentence_with_its_line(tmp_path, bad, words):
    path = write(tmp_path, lines(MOONCAKE[0]) + bad + "\n" + lines(MOONCAKE[1]), "t.jsonl")
    with pytest.raises(WorkloadError) as error:
        read_trace(path)
    told = str(error.value)
    assert told.startswith(f"{path}:2: ") and words in told and len(told) < 700
    assert "--skip-bad-rows" in told
    work = read_trace(path, skip_bad=True)
    assert len(work) == 2 and work.notes[0].startswith("1 bad rows left out")


@pytest.mark.parametrize("text, where", [
    ("x" * 140_000 + ",prompt,output\n1,2,3\n", ":1: is no header of a CSV trace"),
    ('at,"prompt,output\n' + "1,2,3\n" * 30_000, ":1: is no header of a CSV trace"),
    ('at,"prompt,output\n1,2,3\n', ":1: no column for 'prompt'"),
    ('[{"timestamp": 1, ' + '"a": 1, ' * 60_000 + "}]", ":1: no column for 'at'"),
    ('at,prompt,output\n1,"2,3\n1,2,3\n1,2,3\n', ":2: has 2 fields, the header 3 (a quote opened "
                                                  "here runs to line 4)"),
    ("at,prompt,output\n" + "y" * 140_000 + ",2,3\n", ":2: not CSV: field larger than")])
def test_whatever_a_csv_holds_it_is_a_short_sentence_with_its_line(tmp_path, text, where):
    path = write(tmp_path, text)
    with pytest.raises(WorkloadError) as error:
        read_trace(path)
    told = str(error.value)
    assert told.startswith(f"{path}{where}") and len(told) < 700 and "\n" not in told


def test_a_field_too_long_for_csv_is_one_bad_row_and_the_rows_after_it_are_read(tmp_path):
    path = write(tmp_path, "at,prompt,output\n0,1,1\n" + "y" * 140_000 + ",2,3\n4,5,6\n")
    work = read_trace(path, skip_bad=True)
    assert columns(work) == [(0.0, 1, 1), (4.0, 5, 6)] and ":3: not CSV" in work.notes[0]


def test_a_thinned_trace_keeps_times_lengths_and_contents_of_what_it_keeps(tmp_path):
    rows = [{"timestamp": i * 1000, "input_length": 512, "output_length": 1 + i, "hash_ids": [i]}
            for i in range(400)]
    whole = read_trace(write(tmp_path, "".join(map(lambda row: json.dumps(row) + "\n", rows)),
                             "t.jsonl"))
    part = whole.sample(0.25, seed=1)
    assert 70 < len(part) < 130 and part.at == whole.sample(0.25, seed=1).at
    assert part.at != whole.sample(0.25, seed=2).at
    for index, (at, output) in enumerate(zip(part.at, part.outputs)):
        assert output == at + 1  # its own row's
        assert part.keys(index, 512)[0] == whole.keys(int(at), 512)[0]
    assert len(whole.sample(1.0)) == 400
    for share in (0, 1.5, float("nan"), 1e-12):
        with pytest.raises(WorkloadError, match="--sample"):
            whole.sample(share)


def test_lengths_can_be_those_of_a_trace(tmp_path):
    path = write(tmp_path, "at,prompt,output\n0,10,3\n1,20,4\n")
    work = make_workload(rate=1.0, num_requests=200, input_len=f"trace:{path}",
                         output_len=f"trace:{path}")
    assert set(work.prompts) == {10, 20} and set(work.outputs) == {3, 4}
    with pytest.raises(WorkloadError, match="nowhere.csv does not exist"):
        make_workload(rate=1.0, input_len="trace:nowhere.csv")


def test_a_missing_or_binary_trace_is_named(tmp_path):
    with pytest.raises(WorkloadError, match="nowhere.csv does not exist: check the path"):
        read_trace(tmp_path / "nowhere.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00at")
    with pytest.raises(WorkloadError, match="is a binary file, not text"):
        read_trace(tmp_path / "binary.csv")


# --------------------------------------------------------------------------- JSONL

def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


MOONCAKE = [{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
            {"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 9]}]


def test_mooncake_blocks_share_keys_exactly_where_hash_ids_agree(tmp_path):
    work = read_trace(write(tmp_path, lines(*MOONCAKE), "t.jsonl"))
    assert work.keys.hash_block == 512 and list(work.at) == [0.0, 3.0]
    for size, shared in ((16, 64), (512, 2), (48, 21), (1024, 1)):
        a, b = work.keys(0, size), work.keys(1, size)
        same = [i for i in range(1100 // size) if a[i] == b[i]]
        assert same == list(range(shared)), size
        assert len({b[i] for i in range(1536 // size)}) == 1536 // size  # no two blocks collide


def test_qwen_bailian_ids_stand_for_16_tokens_and_its_times_are_seconds(tmp_path):
    rows = [{"chat_id": 1, "timestamp": 61.5, "input_length": 40, "output_length": 5,
             "hash_ids": [7, 8, 9]}, {"chat_id": 2, "timestamp": 63.0, "input_length": 33,
                                      "output_length": 5, "hash_ids": [7, 8, 3]}]
    work = read_trace(write(tmp_path, lines(*rows), "t.jsonl"))
    assert work.keys.hash_block == 16 and list(work.at) == [0.0, 1.5]


@pytest.mark.parametrize("bad, words", [
    ("{", "not JSON"), ("[1]", "found list; wanted timestamp"), ("{}", "wanted timestamp"),
    (json.dumps(MOONCAKE[0] | {"input_length": 0}), "input_length=0 must be"),
    (json.dumps(MOONCAKE[0] | {"output_length": "x"}), "output_length='x' is not"),
    (json.dumps(MOONCAKE[0] | {"timestamp": "soon"}), "timestamp='soon' is not a number"),
    (json.dumps(MOONCAKE[0] | {"hash_ids": [1.5]}), "hash_ids must be")])
def test_a_bad_json_line_names_file_and_line(tmp_path, bad, words):
    path = write(tmp_path, lines(MOONCAKE[0]) + bad + "\n", "t.jsonl")
    with pytest.raises(WorkloadError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:2: ") and words in str(error.value)


def test_hash_ids_that_fit_no_block_size_name_the_request(tmp_path):
    path = write(tmp_path, lines(MOONCAKE[0] | {"hash_ids": [1] * 7}), "t.jsonl")
    with pytest.raises(WorkloadError, match="request 0 has 7 hash_ids for 1100 tokens"):
        read_trace(path)


# --------------------------------------------------------------------------- the real files

def test_the_azure_hours_have_their_published_sizes(traces):
    conv = read_trace(traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv")
    assert (len(conv), sum(conv.prompts), sum(conv.outputs)) == (19_366, 22_361_870, 4_088_665)
    assert conv.span == pytest.approx(3501.7, abs=0.1) and not conv.notes
    code = read_trace(traces / "azure2023" / "AzureLLMInferenceTrace_code.csv")
    assert len(code) == 8_819 and code.rate == pytest.approx(2.57, abs=0.01)


def test_mooncakes_conversation_trace_shares_37_percent_of_its_blocks(traces):
    work = read_trace(traces / "mooncake_fast25" / "conversation_trace.jsonl")
    seen, hits, blocks = set(), 0, 0
    for index, prompt in enumerate(work.prompts):
        keys = work.keys(index, 512)
        for key in [keys[i] for i in range(prompt // 512)]:
            hits += key in seen
            seen.add(key)
            blocks += 1
    assert len(work) == 12_031 and hits / blocks == pytest.approx(0.38, abs=0.02)
