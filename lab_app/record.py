"""Records the shipped log: `python -m lab_app.record lab_app/data/tiny_crowded.jsonl.gz`.

The tiny model on a CPU, requests coming in every other step, a pool so small that it preempts and
evicts, and chats that share a system prompt, so prefixes are found. Arrivals follow the step count,
not the clock: the same machine or another, the schedule is the same; only the times differ.
"""

from __future__ import annotations

import sys
from typing import Any

SYSTEM = "You are a helpful little model. Answer in one sentence."
QUESTIONS = (
    "What is the capital of France?", "What colour is a fox?", "What does a bear eat?",
    "What is the capital of Japan?", "Where does the whale live?", "Tell me a story about a frog.",
    "What is the opposite of big?", "How many legs has a bee?", "What is a token?",
    "What is the capital of Egypt?", "What sound does a cow make?", "Tell me a story about an owl.")
STORIES = ("Once upon a time there was a little bear.", "Monday was a rainy day in Oakford.",
           "The fox and the duck went to the river.", "Dear diary, today I saw a whale.")
SETTINGS: dict[str, Any] = {
    "num_kvcache_blocks": 24, "kvcache_block_size": 8, "max_num_batched_tokens": 64,
    "max_num_seqs": 8, "max_model_len": 160}
NUM_REQUESTS = 24
GAP = 2  # steps between two arrivals


def prompts(llm: Any) -> list[list[int]]:
    """Token ids: chats under one system prompt, and every fourth a story to go on with."""
    made = []
    for number in range(NUM_REQUESTS):
        if number % 4 == 3:
            made.append(llm.tokenizer.encode(STORIES[number // 4 % len(STORIES)]))
        else:
            question = QUESTIONS[number % len(QUESTIONS)]
            made += llm.render_chat([{"role": "system", "content": SYSTEM},
                                     {"role": "user", "content": question}])
    return made


def record(path: str) -> None:
    """Run and write the log."""
    from engine.core.request import Request, SamplingParams
    from engine.llm import LLM
    with LLM("tiny", log=path, **SETTINGS) as llm:
        engine, line, turn = llm.engine, prompts(llm), 0
        eos = engine.runner.config.eos_token_ids
        sessions = []
        while line or engine.scheduler.has_unfinished():
            if line and turn % GAP == 0:
                ids = line.pop(0)
                params = SamplingParams(temperature=0, max_tokens=40 + 8 * (len(line) % 4))
                name = f"r{NUM_REQUESTS - len(line) - 1}"
                sessions.append(engine.submit(Request(name, ids, params, eos_ids=eos,
                                                      arrival_time=engine.clock())))
            engine.step()
            turn += 1
        for session in sessions:
            engine.close(session)


if __name__ == "__main__":
    record(sys.argv[1])
