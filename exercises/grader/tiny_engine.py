"""The real engine, on the tiny model, with another's block pool. Only this module loads torch."""

from __future__ import annotations

from typing import Any

from engine.core.events import EventLog
from engine.core.request import SamplingParams
from engine.llm import LLM

Work = list[tuple[list[int], int, int]]  # prompt token ids, max_tokens, samples


def run_tiny(work: Work, *, num_blocks: int, block_size: int, pool: Any
             ) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
    """Generate everything in one go; the events, and the output tokens of each sample by name.

    Greedy where one sample is wanted, seeded where there are more: the outputs depend on nothing
    but the work. Prefix caching is off.
    """
    log = EventLog(None, {})
    with LLM("tiny", log=log, scheduler_options={"pool": pool}, num_kvcache_blocks=num_blocks,
             kvcache_block_size=block_size, max_model_len=96, max_num_batched_tokens=64,
             max_num_seqs=6, enable_prefix_caching=False) as llm:
        params = [SamplingParams(temperature=0.0 if samples == 1 else 1.0, n=samples, seed=7,
                                 max_tokens=max_tokens, ignore_eos=True)
                  for _, max_tokens, samples in work]
        outputs = llm.generate([prompt for prompt, _, _ in work], params)
    tokens = {f"{output.request_id}.{sample.index}": sample.token_ids
              for output in outputs for sample in output.outputs}
    return log.events or [], tokens
