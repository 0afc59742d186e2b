"""The GPU script's parts that run the whole engine: the same tokens with graphs, look-ahead, swap
and other back ends, and nano-vllm's benchmark against what the memory's bandwidth allows."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.gpu.device import Device, guarded, median
from tests.gpu.parts import shape, verdict

QWEN3_06B = {  # its config.json, as far as it is read
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "tie_word_embeddings": True,
    "dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151645}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "dtype": "float32"}
WAYS = {  # every one must bring the tokens of the first
    "one step after the other, eager": {"enforce_eager": True, "overlap": False},
    "graphs": {"overlap": False},
    "look-ahead, eager": {"enforce_eager": True},
    "graphs and look-ahead": {},
    "preempted": {"num_kv_blocks": 40},
    "swapped": {"num_kv_blocks": 40, "preemption": "swap"},
    "swapped, one after the other": {"num_kv_blocks": 40, "preemption": "swap", "overlap": False,
                                     "enforce_eager": True},
}
FEW_TIES = 0.05  # share of requests whose tokens may part where two logits are all but equal


def model_directory(device: Device, folder: str) -> str:
    """Qwen3-0.6B without weights: load_format "dummy" makes random ones."""
    values = QWEN3_06B | (SMALL if device.rehearsal else {})
    (Path(folder) / "config.json").write_text(json.dumps(values))
    return folder


def engine_for(device: Device, model: str, **options: Any) -> Any:
    from engine import LLM
    from engine.runner.graphs import EagerRecorder
    llm = LLM(model, device=device.name, **{"overlap": True, **options})
    if device.rehearsal and not options.get("enforce_eager"):
        llm.engine.runner.record_graphs(options["max_num_seqs"], EagerRecorder())
    return llm


def requests(number: int, vocab: int) -> tuple[list[list[int]], list[Any]]:
    """Greedy and seeded requests with common prefixes and penalties."""
    from engine import SamplingParams
    rng = random.Random(0)
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    prompts = [shared[:rng.choice([0, 0, 20, 40])]
               + [rng.randrange(3, vocab) for _ in range(rng.randint(1, 60))]
               for _ in range(number)]
    return prompts, [SamplingParams(
        temperature=0.8 if n % 2 else 0.0, max_tokens=rng.randint(5, 60), seed=n, ignore_eos=True,
        top_k=rng.choice([0, 20]), repetition_penalty=1.1 if n % 5 == 0 else 1.0)
        for n in range(number)]


def engine_tokens(device: Device) -> dict[str, Any]:
    """The tiny model in float32, over graphs, look-ahead, preemption and swap."""
    prompts, params = requests(device.size(48, 6), 1000)
    expected: list[list[int]] = []
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, options in WAYS.items():
        with engine_for(device, "tiny", dtype="float32", max_model_len=192, max_num_seqs=32,
                        **{"num_kv_blocks": 600, **options}) as llm:
            outputs = llm.generate(prompts, params)
            graphs = llm.engine.runner.graphs
        ids = [output.token_ids for output in outputs]
        expected = expected or ids
        apart = sum(one != other for one, other in zip(ids, expected, strict=True))
        preempted = sum(output.outputs[0].num_preemptions for output in outputs)
        found[name] = {"apart": apart, "preempted": preempted,
                       "graphs": None if graphs is None else len(graphs.sizes)}
        if apart > FEW_TIES * len(ids):
            failures[name] = f"{apart} of {len(ids)} requests have other tokens"
        if not device.rehearsal and (graphs is None) != bool(options.get("enforce_eager")):
            failures[name] = f"graphs: {graphs}"
        if "num_kv_blocks" in options and not preempted and not device.rehearsal:
            failures[name] = "nothing was preempted"
    return verdict(found, failures)


def engine_logits(device: Device) -> dict[str, Any]:
    """Qwen3-0.6B's shapes: logits of replayed decodes against eager ones, in bfloat16."""
    errors: list[float] = []
    with tempfile.TemporaryDirectory() as folder, engine_for(
            device, model_directory(device, folder), load_format="dummy", overlap=False,
            max_model_len=256, max_num_seqs=20, num_kv_blocks=400) as llm:
        runner, inner = llm.engine.runner, llm.engine.runner.forward

        def forward(inputs: Any, late: Any = None) -> torch.Tensor:
            replayed = inner(inputs, late).float().clone()
            graphs, runner.graphs = runner.graphs, None
            eager = inner(inputs, late).float()  # writes the same K/V once more
            runner.graphs = graphs
            errors.append(float((replayed - eager).abs().max() / eager.abs().max()))
            return eager
        runner.forward = forward
        llm.generate(*requests(device.size(20, 3), 500))
    found = {"steps": len(errors), "largest relative error": max(errors), "median": median(errors)}
    return verdict(found, [found] if max(errors) > 0.03 else [])


def engine_bench(device: Device) -> dict[str, Any]:
    """nano-vllm's benchmark (256 requests, 100 to 1,024 tokens in and out), each way to run it."""
    from engine.attention.select import availability
    ways: dict[str, dict[str, Any]] = {
        "triton, graphs, look-ahead": {"attention": "triton"},
        "triton, graphs": {"attention": "triton", "overlap": False},
        "triton, look-ahead": {"attention": "triton", "enforce_eager": True},
        "flash, graphs, look-ahead": {"attention": "flash", "block_size": 256},
        "torch": {"attention": "torch"},
    }
    if device.rehearsal:
        ways = {"torch": {"attention": "torch"}}
    found: dict[str, Any] = {"read_bytes_per_s": read_bandwidth(device)}
    with tempfile.TemporaryDirectory() as folder:
        model = model_directory(device, folder)
        for number, (name, options) in enumerate(ways.items()):
            if device.late():
                return found | {"stopped": "no time left"}
            reason = availability(shape(device, options.get("block_size", 16)))[
                options["attention"]]
            if reason is not None:
                found[name] = {"unavailable": reason}
                continue
            scale = 1 if number == 0 else 4  # the first way runs the whole workload
            found[name] = guarded(serve, device, model, found["read_bytes_per_s"], scale, options)
    return found


def read_bandwidth(device: Device) -> float:
    """Bytes a second that a large reduction reads."""
    values = torch.randint(9, (device.size(2**29, 2**14),), dtype=torch.int32, device=device.name)
    return values.nbytes / median(device.seconds(lambda: values.sum(dtype=torch.int32)))


def serve(device: Device, model: str, bandwidth: float, scale: int,
          options: dict[str, Any]) -> dict[str, Any]:
    """One run of the workload over `scale`; what its pure decode steps took, and what reading the
    weights and their K/V once takes at `bandwidth`."""
    from engine.benchmark import submit, warm_up
    from engine.workload import Range, make_workload
    lengths = Range(*((5, 12) if device.rehearsal else (100, 1024)))
    workload = make_workload(device.size(256, 4) // scale or 1, lengths, lengths, 0,
                             512 if device.rehearsal else 151936)
    loading = time.perf_counter()
    with engine_for(device, model, load_format="dummy", max_model_len=4096, max_num_seqs=256,
                    max_num_batched_tokens=16384, **options) as llm:
        loading = time.perf_counter() - loading
        warm_up(llm, workload)
        decodes: list[tuple[float, float, int]] = []  # seconds, bytes read at least, rows
        weights = weight_bytes(llm)
        runner = llm.engine.runner
        kv_token = runner.config.kv_bytes_per_token(runner.cache.device_blocks.element_size())

        def note(batch: Any, output: Any, seconds: float) -> None:
            if batch.counts and max(batch.counts) == 1:
                context = sum(batch.starts) + len(batch)
                decodes.append((seconds, weights + context * kv_token, len(batch)))
        llm.engine.on_step = note
        sessions = [submit(llm, number, workload, 0.6) for number in range(len(workload.prompts))]
        started = time.perf_counter()
        while llm.engine.step():
            pass
        wall = time.perf_counter() - started
        assert all(session.request.num_output == wanted for session, wanted
                   in zip(sessions, workload.outputs, strict=True))
        blocks = llm.engine.scheduler.config.num_blocks
    took = sum(seconds for seconds, _, _ in decodes)
    least = sum(read for _, read, _ in decodes) / bandwidth
    full = [entry for entry in decodes if entry[2] == max(rows for _, _, rows in decodes)]
    return {"requests": len(sessions), "output_tokens": workload.output_tokens, "seconds": wall,
            "output_tokens_per_s": workload.output_tokens / wall, "load_seconds": loading,
            "blocks": blocks, "decode_steps": len(decodes), "decode_seconds": took,
            "bandwidth_seconds": least, "decode_over_bandwidth": took / least,
            "largest_batch": full[0][2], "its_median_ms": 1e3 * median([e[0] for e in full]),
            "its_bandwidth_ms": 1e3 * median([e[1] for e in full]) / bandwidth,
            "peak_bytes": None if device.rehearsal else torch.cuda.max_memory_allocated()}


def weight_bytes(llm: Any) -> int:
    """Bytes of weights that a decode step reads: all; a tied embedding is read as the head."""
    model = llm.engine.runner.model
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    embedding = model.model.embed_tokens.weight
    tied = model.lm_head.weight is embedding
    return total - (0 if tied else embedding.numel() * embedding.element_size())
