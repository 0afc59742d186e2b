"""One engine, told over standard input what to serve: started by vllm_cpu.py.

Needs of this repository only what its engine needs, so that vLLM's Python can run it too. Lines
that begin with "@ " on standard output are answers; everything else is the libraries' talk.
"""

from __future__ import annotations

import json
import os
import sys
import time

WARM_UP = 4  # tokens


def answer(**values) -> None:
    print("@ " + json.dumps(values), flush=True)


def cores() -> dict[str, int]:
    """How many threads of this process may run on which cores: {"0,1": 3, "0": 1}."""
    found: dict[str, int] = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            allowed = ",".join(map(str, sorted(os.sched_getaffinity(int(thread)))))
        except OSError:
            continue  # it has ended
        found[allowed] = found.get(allowed, 0) + 1
    return found


class Tandem:
    def __init__(self, name: str, model: str, dtype: str, longest: int, most: int):
        from engine import LLM
        self.llm = LLM(model, attention=name, dtype=dtype, max_model_len=longest,
                       max_num_seqs=most, enable_prefix_caching=False)

    def serve(self, prompts, outputs, temperature) -> int:
        from engine import SamplingParams
        params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)
                  for length in outputs]
        return sum(len(one.token_ids) for one in self.llm.generate(prompts, params))

    def setup(self) -> dict:
        import torch
        return {"attention": self.llm.engine.runner.attention.name, "torch": torch.__version__,
                "threads": torch.get_num_threads()}


class Vllm:
    def __init__(self, name: str, model: str, dtype: str, longest: int, most: int):
        from vllm import LLM
        self.llm = LLM(model, dtype=dtype, max_model_len=longest, max_num_seqs=most,
                       enable_prefix_caching=False)

    def serve(self, prompts, outputs, temperature) -> int:
        from vllm import SamplingParams
        params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=length)
                  for length in outputs]
        done = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params,
                                 use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    def setup(self) -> dict:
        import torch
        import vllm
        names = ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "LD_PRELOAD")
        return {"vllm": vllm.__version__, "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "settings": {name: os.environ.get(name) for name in names}}


class Transformers:
    """A static batch: padded to the longest prompt, run to the longest output."""

    def __init__(self, name: str, model: str, dtype: str, longest: int, most: int):
        import torch
        from transformers import AutoModelForCausalLM
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None

    def serve(self, prompts, outputs, temperature) -> int:
        import torch
        width, most = max(map(len, prompts)), max(outputs)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt)
                             for prompt in prompts])
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {
            "do_sample": False}
        with torch.inference_mode():
            out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most,
                                      min_new_tokens=most, pad_token_id=0, **drawing)
        assert out.shape[1] == width + most
        return sum(outputs)  # what was asked for; the rest was computed for nothing

    def setup(self) -> dict:
        import torch
        import transformers
        return {"transformers": transformers.__version__, "torch": torch.__version__,
                "threads": torch.get_num_threads()}


def main() -> None:
    name, model, dtype, longest, most = sys.argv[1:]
    kind = {"vllm": Vllm, "transformers": Transformers}.get(name, Tandem)
    engine = kind(name, model, dtype, int(longest), int(most))
    prompts = [list(range(7, 60)), list(range(9, 40))]
    for temperature in (0.0, 0.6):
        engine.serve(prompts, [WARM_UP] * len(prompts), temperature)
    answer(**engine.setup(), threads_by_cores=cores())
    for line in sys.stdin:
        job = json.loads(line)
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = engine.serve(job["prompts"], job["outputs"], job["temperature"])
        answer(tokens=tokens, seconds=time.perf_counter() - wall,
               cpu_seconds=time.process_time() - cpu)


if __name__ == "__main__":
    main()
