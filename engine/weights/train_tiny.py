"""Makes the tiny model that ships in the repository: text, tokenizer, training, files, report.

    python -m engine.weights.train_tiny --out engine/weights/tiny --steps 2200 --seed 0

Everything follows from the seed (and the torch build); one core is enough. The model's README
(`tiny/README.md`) holds the figures of the run that made the files. The engine never imports this
module; it is the only one here that needs `transformers` as a trainer.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from engine.weights import tiny_corpus

SPECIAL_TOKENS = [tiny_corpus.END_OF_TEXT, tiny_corpus.IM_START, tiny_corpus.IM_END]  # ids 0, 1, 2
VOCAB_SIZE = 1024
SHORT_BATCH, LONG_BATCH = (2, 512), (1, 2048)  # rows, tokens a row
LONG_SHARE = 0.08  # the last steps take the long batch, so that every position is trained
PEAK_LR, WARMUP_STEPS = 3e-3, 100

# Qwen's own split: words, single digits, runs of punctuation, line ends.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 160,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # on purpose not hidden_size / num_attention_heads (40): must be read
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": LONG_BATCH[1],
    "rope_theta": 10000.0,  # where transformers 4 and plain readers look
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
    },  # where transformers 5 looks
    "tie_word_embeddings": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "bfloat16",  # transformers 5's name; torch_dtype is transformers 4's
    "torch_dtype": "bfloat16",
}
CHAT_PROMPTS = [
    "Hello!", "Who are you?", "What is the capital of France?", "What does a bear eat?",
    "Tell me about the whale.", "Show me a fox.", "How do you say hello in Japanese?",
    "Count from 1 to 15.", "What is 7 plus 5?", "What is a KV cache?", "How do I make soup?",
    "Tell me a story about an owl called Vokobami.", "tell me a story",
    "Which day comes after Sunday?", "Who wrote Hamlet?",
]  # fmt: skip
RECALL_CHAT = [
    {"role": "user", "content": "My name is Zorami."},
    {"role": "assistant", "content": "Nice to meet you, Zorami!"},
    {"role": "user", "content": "What colour is the sky?"},
    {"role": "assistant", "content": "The sky is blue."},
    {"role": "user", "content": "What is my name?"},
]
PLAIN_PROMPTS = ["Once upon a time", "The diary of Mia the frog.", "The fox is red,"]


# -- tokenizer -----------------------------------------------------------------------------------


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens, the special ones first.

    It learns merges from ASCII documents only, so that other characters stay several tokens each:
    any text still round-trips, and detokenizers meet half characters.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    stream = tiny_corpus.documents(seed)
    texts = (text for text in (next(stream) for _ in range(20_000)) if text.isascii())
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json and the two Hugging Face files beside it."""
    names = {"eos_token": tiny_corpus.IM_END, "pad_token": tiny_corpus.END_OF_TEXT}
    extra = [tiny_corpus.IM_START]
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "special_tokens_map.json", {**names, "additional_special_tokens": extra})
    write_json(
        out / "tokenizer_config.json",
        {
            # Not Qwen2Tokenizer: that class normalizes to NFC, and then not every text round-trips.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": LONG_BATCH[1],
            "clean_up_tokenization_spaces": False,
            "bos_token": None,
            **names,
            "additional_special_tokens": extra,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- training ------------------------------------------------------------------------------------


def packed_rows(tokenizer: Tokenizer, texts: Iterator[str], length: int) -> Iterator[list[int]]:
    """Rows of `length` token ids: whole documents from the first token on, the last one cut."""
    while True:
        row: list[int] = []
        while len(row) < length:
            row += tokenizer.encode(next(texts)).ids
        yield row[:length]


def batches(tokenizer: Tokenizer, seed: int, steps: int) -> Iterator[torch.Tensor]:
    """One [rows, tokens] int64 batch a step: short ones first, long ones at the end."""
    texts = tiny_corpus.documents(seed)
    for step in range(steps):
        num_rows, length = LONG_BATCH if step >= steps * (1 - LONG_SHARE) else SHORT_BATCH
        rows = packed_rows(tokenizer, texts, length)
        yield torch.tensor([next(rows) for _ in range(num_rows)])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up to PEAK_LR, then half a cosine down to 1 % of it."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return PEAK_LR * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(tokenizer: Tokenizer, steps: int, seed: int) -> tuple[Qwen3ForCausalLM, float]:
    """A float32 model trained for `steps` steps, and its mean loss (nats a token) at the end."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {**CONFIG, "dtype": "float32"}
    model = Qwen3ForCausalLM(Qwen3Config(**settings)).train()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    losses, began = [], time.perf_counter()
    for step, ids in enumerate(batches(tokenizer, seed + 1, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 99:
            mean, passed = sum(losses[-100:]) / 100, time.perf_counter() - began
            print(f"step {step + 1:5d}  loss {mean:.4f}  {passed:6.1f} s", flush=True)
    last = losses[-100:]
    return model.eval(), sum(last) / len(last)


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write the weights in bfloat16 (the tied output head once) and the two config files."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone
    write_json(out / "config.json", CONFIG)
    eos = [SPECIAL_TOKENS.index(tiny_corpus.IM_END), SPECIAL_TOKENS.index(tiny_corpus.END_OF_TEXT)]
    write_json(
        out / "generation_config.json",
        {"do_sample": False, "eos_token_id": eos, "pad_token_id": 0},
    )


# -- report --------------------------------------------------------------------------------------


@torch.inference_mode()
def greedy(model, tokenizer, prompt: str, max_new: int = 400) -> tuple[str, torch.Tensor]:
    """The greedy continuation, special tokens shown, and each step's top-2 logit margin [steps]."""
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new)
    logits = model(out[:, :-1]).logits[0, ids.shape[1] - 1 :].float()  # [steps, vocab]
    top = logits.topk(2).values
    return tokenizer.decode(out[0, ids.shape[1] :]), top[:, 0] - top[:, 1]


@torch.inference_mode()
def exact_share(model, tokenizer, ask, seed: int, num_questions: int) -> float:
    """The share of questions of one kind that greedy decoding answers word for word.

    Greedy gives the expected answer exactly when each of its tokens is the best one after the
    tokens before it, so one forward pass a question tells.
    """
    rng, right = random.Random(seed), 0
    for _ in range(num_questions):
        question, answer = ask(rng)
        prompt = chat_prompt(tokenizer, [{"role": "user", "content": question}])
        start = len(tokenizer(prompt).input_ids)
        ids = tokenizer(prompt + answer + tiny_corpus.IM_END, return_tensors="pt").input_ids
        best = model(ids[:, :-1]).logits[0, start - 1 :].argmax(-1)  # [answer tokens]
        right += bool((best == ids[0, start:]).all())
    return right / num_questions


def chat_prompt(tokenizer, messages: list[dict]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def report(out: Path, seed: int) -> None:
    """Load the written files as a user would, in float32, and print samples, shares and margins."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in CHAT_PROMPTS] + [RECALL_CHAT]
    prompts = [chat_prompt(tokenizer, chat) for chat in chats] + PLAIN_PROMPTS
    margins = []
    for prompt in prompts:
        text, margin = greedy(model, tokenizer, prompt)
        margins.append(margin)
        print(f"--- {prompt!r}\n{text}\n[{len(margin)} tokens, least margin {margin.min():.3f}]")
    steps = torch.cat(margins)
    near = [f"{(steps < limit).float().mean():.2%} < {limit}" for limit in (1e-2, 1e-1, 1.0)]
    print(f"top-2 margins over {len(steps)} greedy steps: {', '.join(near)}")
    for ask in tiny_corpus.QUESTIONS:
        if ask is not tiny_corpus.story_request:  # a story has many right forms
            print(
                f"{ask.__name__:20s} {exact_share(model, tokenizer, ask, seed + 2, 100):.0%} exact"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # several threads add in another order and give other weights
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tokenizer = train_tokenizer(args.seed)
    save_tokenizer(tokenizer, args.out)
    model, loss = train(tokenizer, args.steps, args.seed)
    save_model(model, args.out)
    num_params = sum(p.numel() for p in model.parameters())
    wall, cpu = (time.perf_counter() - began) / 60, time.process_time() / 60
    print(f"{num_params:,} parameters, final loss {loss:.4f}, {wall:.1f} min, {cpu:.1f} CPU min")
    report(args.out, args.seed)


if __name__ == "__main__":
    main()
