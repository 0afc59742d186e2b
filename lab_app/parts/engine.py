"""The real engine behind the Run page. torch is loaded when something is run, not before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec

from engine.core.request import SamplingParams
from lab_app.store import Entry
from lab_app.viewmodel.runform import RunForm, Transcript, engine_settings

NO_TORCH = ("The real engine needs PyTorch, which is not installed here. Replay and Simulate work "
            "without it; `pip install torch` (or `pip install -e .`) makes Run work too.")


def has_torch() -> bool:
    return find_spec("torch") is not None


def models() -> list[str]:
    """Models that run without a download: the shipped one, and what has been pulled."""
    from engine.weights.resolve import PULLABLE, pulled_dir
    return ["tiny", *(name for name in PULLABLE if (pulled_dir(name) / "config.json").is_file())]


def run_prompts(form: RunForm, prompts: list[str], entry: Entry,
                show: Callable[[list[Transcript]], None]) -> tuple[list[Transcript], list[str]]:
    """Run all prompts together, writing the log; `show` sees the texts grow step by step. Returns
    the texts and the engine's warnings. TandemError subclasses for what cannot work."""
    from engine.llm import LLM
    params = SamplingParams(max_tokens=form.max_tokens, temperature=form.temperature,
                            seed=form.seed)
    scripts = {f"r{place}": Transcript(prompt) for place, prompt in enumerate(prompts)}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        with LLM(form.model, log=entry.path, **engine_settings(form)) as llm:
            asked: list[object] = list(prompts)
            if form.chat:
                asked = list(llm.render_chat([[{"role": "user", "content": prompt}]
                                              for prompt in prompts]))
            for delta in llm.stream(asked, params):  # type: ignore[arg-type]
                script = scripts[delta.request_id]
                script.text += delta.text
                script.tokens += len(delta.token_ids)
                script.finish_reason, script.error = delta.finish_reason, delta.error
                show(list(scripts.values()))
    return list(scripts.values()), [str(warning.message) for warning in told
                                    if "Tandem" in warning.category.__name__]
