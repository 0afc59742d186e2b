"""The real executor: a Batch becomes tensors, a forward pass, and tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.attention import AttentionShape, StepInputs, make_backend
from engine.attention.cpu_paged import CpuPaged
from engine.attention.upload import upload
from engine.core.batch import Batch, RowFailed
from engine.core.errors import ConfigError
from engine.layers.kernels import use_kernels
from engine.layers.rope import RopeTable
from engine.layers.shard import ALONE, Shard
from engine.models.config import ModelConfig
from engine.models.registry import build_model
from engine.models.step import ModelStep
from engine.runner.graphs import DecodeGraphs, Fill, Recorder, bucket_sizes
from engine.runner.inputs import build_inputs, execution_order
from engine.runner.kv_cache import KVCache
from engine.runner.logits import SampleRow
from engine.runner.sampler import Draw, TokenLogprobs
from engine.weights.loader import dummy_weights, load_weights, prepare_layers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "float64": torch.float64}
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
                 "bf16": "bfloat16", "fp64": "float64", "double": "float64"}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed, one entry a row of the batch."""

    tokens: list[int | None | RowFailed]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where asked for


@dataclass(slots=True)
class Prepared:
    """A step as the device needs it: from here on its requests may change."""

    batch: Batch
    inputs: StepInputs | None = None  # None: the batch has no rows
    rows: list[int] = field(default_factory=list)  # batch rows that sample, in the logits' order
    samples: list[SampleRow] = field(default_factory=list)  # one each
    before: Prepared | None = None  # look-ahead: the step whose tokens are not known yet
    unknown: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # flat tokens it
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # brings; its rows
    draw: Draw | None = None  # set by launch(), if a row samples
    error: Exception | None = None  # by launch(): computed as it should be, but not sampled

    drawn: torch.Tensor | None = None  # [rows] int64 on the device, set by launch() or follow()

    def read(self) -> StepOutput:
        """Wait until the step is computed, and hand out its tokens, or raise why there are none."""
        if self.error is not None:
            raise self.error
        tokens: list[int | None | RowFailed] = [None] * len(self.batch)
        logprobs = {}
        if self.draw is not None:
            samples = self.draw.read()
            for row, token, logprob in zip(self.rows, samples.tokens, samples.logprobs,
                                           strict=True):
                tokens[row] = token
                if logprob is not None:
                    logprobs[row] = logprob
        return StepOutput(tokens, logprobs)

    def fill(self, ids: torch.Tensor) -> None:
        """Put the tokens that the step before drew where `ids` [tokens] has none."""
        assert self.before is not None and self.before.drawn is not None
        unknown, sources = upload((self.unknown, self.sources), ids.device)
        ids.index_copy_(0, unknown, self.before.drawn.index_select(0, sources))


class ModelRunner:
    """A model, its KV cache, and an attention back end. One thread at a time.

    `run(batch)` does a step from end to end. Look-ahead takes it in three: prepare_step() on the
    host, launch() for the device, and Prepared.read(), which waits.
    """

    def __init__(self, model: torch.nn.Module, config: ModelConfig, *, num_blocks: int,
                 block_size: int, max_model_len: int, dtype: torch.dtype,
                 num_cpu_blocks: int = 0, attention: str = "auto", seed: int = 0,
                 shard: Shard = ALONE, device: torch.device | str = "cpu"):
        self.model, self.config, self.shard = model, config, shard
        self.block_size, self.seed, self.max_model_len = block_size, seed, max_model_len
        self.device, self.dtype = torch.device(device), dtype
        kv_heads = kv_heads_of(config, shard)
        heads = shard.share(config.num_attention_heads, "num_attention_heads")
        self.rope = RopeTable(config, max_model_len, dtype, self.device)
        self.cache = KVCache(num_layers=config.num_hidden_layers, num_blocks=num_blocks,
                             block_size=block_size, num_kv_heads=kv_heads, head_dim=config.head_dim,
                             dtype=dtype, device=self.device, num_cpu_blocks=num_cpu_blocks)
        self.attention = make_backend(attention, AttentionShape(
            heads, kv_heads, config.head_dim, block_size, dtype, self.device))
        if isinstance(self.attention, CpuPaged):
            use_kernels(model, self.attention.kernels)
        self.graphs: DecodeGraphs | None = None
        self.shares_tokens = False  # after each step, with the other ranks: for look-ahead
        self.num_replays = 0  # of graphs, whose exchanges with other ranks nobody else counts

    def record_graphs(self, max_num_seqs: int, recorder: Recorder) -> None:
        """Compute decode steps of up to `max_num_seqs` rows over static buffers from now on.
        ConfigError if the recording fails."""
        self.graphs = self.make_graphs(bucket_sizes(max_num_seqs), recorder)

    @torch.inference_mode()
    def make_graphs(self, sizes: list[int], recorder: Recorder) -> DecodeGraphs:
        """Record these sizes, ascending, without putting them to use."""
        out = torch.empty(sizes[-1], self.config.hidden_size, dtype=self.dtype, device=self.device)
        with self.current_device():
            return DecodeGraphs(
                self._hidden, self.attention, num_blocks=self.cache.num_blocks,
                width=-(-self.max_model_len // self.block_size), sizes=sizes, recorder=recorder,
                out=out)

    # ------------------------------------------------------------------ a step
    def execute(self, batch: Batch) -> list[int | None | RowFailed]:
        """Compute one step: a token for each row that samples, None for partial chunks, RowFailed
        for rows that went wrong alone. An empty batch only moves blocks."""
        return self.run(batch).tokens

    def run(self, batch: Batch) -> StepOutput:
        """`execute`, with the log-probabilities that rows asked for."""
        step = self.prepare_step(batch)
        self.launch(step)
        return step.read()

    def prepare_step(self, batch: Batch, before: Prepared | None = None) -> Prepared:
        """The host's part. `before` is the step in flight, if there is one."""
        if not len(batch):
            return Prepared(batch)
        order, inputs = self.prepare(batch)
        rows = [row for row in order.tolist() if row not in batch.partial]
        step = Prepared(batch, inputs, rows, [
            SampleRow(batch.requests[row], batch.starts[row] + batch.counts[row]) for row in rows])
        if before is not None and before.rows:
            self._link(step, order.tolist(), before)
        return step

    def _link(self, step: Prepared, order: list[int], before: Prepared) -> None:
        """Find the rows whose only token is one that `before` has yet to bring."""
        batch = step.batch
        places = {before.batch.requests[row].seq: at for at, row in enumerate(before.rows)}
        unknown = [(at, places[batch.requests[row].seq]) for at, row in enumerate(order)
                   if batch.starts[row] >= len(batch.requests[row].tokens or ())]
        if not unknown:
            return
        step.before = before
        assert step.inputs is not None
        step.unknown = step.inputs.cu_seqlens_q[[at for at, _ in unknown]].astype(np.int64)
        step.sources = np.array([source for _, source in unknown], dtype=np.int64)
        late = {order[at]: source for at, source in unknown}
        step.samples = [row._replace(latest=partial(_token_of, before, late[number]))
                        if number in late else row
                        for number, row in zip(step.rows, step.samples, strict=True)]

    @torch.inference_mode()
    def launch(self, step: Prepared) -> None:
        """The device's part: moves, forward pass, sampling. On CUDA it is only queued, unless a
        parameter such as a repetition penalty must see the token of the step before."""
        with self.current_device():
            self._launch(step)

    def _launch(self, step: Prepared) -> None:
        self.move_blocks(step.batch)
        if step.inputs is None:
            return
        logits = self.forward(step.inputs, step.fill if step.before is not None else None)
        if step.rows:
            self._draw(step, logits)
            if self.shares_tokens:
                self._share(step)
        step.before, step.samples = None, []  # or every step since the first would be kept

    def _draw(self, step: Prepared, logits: torch.Tensor) -> None:
        """Start the sampling. What goes wrong is left to read(): the other ranks, which sample
        nothing, are in step all the same, and may be waiting for what comes next."""
        try:
            step.draw = Draw(logits, step.samples, self.seed)
            step.drawn = step.draw.tokens
        except Exception as error:
            step.error = error

    def _share(self, step: Prepared) -> None:
        """Look-ahead of several ranks: all start the next step on what rank 0 has drawn."""
        assert self.shard.wire is not None
        if step.drawn is None:  # a token of the vocabulary, if rank 0 has none
            step.drawn = torch.zeros(len(step.rows), dtype=torch.int64, device=self.device)
        step.drawn = self.shard.wire.share(step.drawn.contiguous())

    def current_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on a thread's current device; this makes it ours."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def follow(self, step: Prepared) -> None:
        """`launch` for a rank that does not sample: the same moves, the same forward pass."""
        with self.current_device():
            self.move_blocks(step.batch)
            if step.inputs is not None:
                self.forward(step.inputs, step.fill if step.before is not None else None)
                if step.rows and self.shares_tokens:
                    self._share(step)
        step.before, step.samples = None, []

    def move_blocks(self, batch: Batch) -> None:
        """What the step does to whole blocks, before it computes."""
        self.cache.swap_out(batch.swap_outs)
        self.cache.copy(batch.copies)
        self.cache.swap_in(batch.swap_ins)

    def prepare(self, batch: Batch) -> tuple[np.ndarray, StepInputs]:
        """The order in which the batch's rows are computed, and their inputs in that order."""
        order = execution_order(batch)
        return order, build_inputs(batch, order, self.block_size)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, late: Fill | None = None) -> torch.Tensor:
        """Logits [sampling rows, vocabulary] in the model's dtype; all tokens' K/V are written.
        `late` puts token ids into the ids on the device that `inputs` lacks."""
        size = None if self.graphs is None else self.graphs.size_for(inputs)
        if self.graphs is not None and size is not None:
            hidden = self.graphs.run(inputs, size, late)
            self.num_replays += 1
            return self.model.lm_head(hidden)  # type: ignore[operator]
        ids, positions, wanted = upload(
            (inputs.input_ids, inputs.positions, inputs.logits_indices), self.device)
        if late is not None:
            late(ids)
        plan = self.attention.plan(inputs, self.cache.num_blocks)
        return self.model(ids, self._context(positions, plan, wanted))

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """What the head is given, [tokens, hidden], for every token."""
        return self.model.model(ids, self._context(positions, plan))  # type: ignore[operator]

    def _context(self, positions: torch.Tensor, plan: Any,
                 wanted: torch.Tensor | None = None) -> ModelStep:
        layers, attention = self.cache.layers, self.attention
        cos, sin = self.rope.at(positions)
        return ModelStep(cos, sin, lambda layer, q, k, v: attention.attend(plan, q, k, v,
                                                                           *layers[layer]), wanted)


def _token_of(step: Prepared, source: int) -> int:
    """The token that row `source` of a launched step draws; waits for it."""
    assert step.draw is not None
    return step.draw.host_tokens()[source]


def kv_heads_of(config: ModelConfig, shard: Shard) -> int:
    """How many key-value heads a rank holds."""
    return shard.of_kv_heads(config.num_key_value_heads).share(
        config.num_key_value_heads, "num_key_value_heads")


def load_model(config: ModelConfig, directory: Path, dtype: torch.dtype, *,
               shard: Shard = ALONE, load_format: str = "auto",
               device: torch.device | str = "cpu") -> torch.nn.Module:
    """The model with its weights, ready to run. `load_format` "dummy" takes random weights.

    UnsupportedModel or WeightsError, naming what is wrong with the directory.
    """
    with torch.device(device):  # each tensor is read straight into its place there
        model = build_model(config, shard, dtype).eval()
    with torch.no_grad():
        if load_format == "dummy":
            dummy_weights(model)
        else:
            load_weights(model, directory)
        prepare_layers(model)
    return model


def compile_layers(model: torch.nn.Module) -> None:
    """Let torch.compile fuse what lies between the attentions, layer by layer. The first steps of a
    new shape take longer."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.forward = torch.compile(layer.forward, dynamic=True)


def parse_dtype(name: str, checkpoint: str, device: str = "cpu") -> torch.dtype:
    """A dtype by name. "auto" is the checkpoint's own, but float32 for a half-precision one on a
    CPU: many CPUs emulate bfloat16 at a tenth of the speed, and greedy output is then the same on
    all. ConfigError lists the known names.
    """
    wanted = checkpoint if name == "auto" else name
    wanted = DTYPE_ALIASES.get(wanted, wanted)
    if wanted not in DTYPES:
        raise ConfigError(f"dtype={wanted!r} is not known; known: auto, {', '.join(DTYPES)}")
    if name == "auto" and device == "cpu" and DTYPES[wanted].itemsize < 4:
        return torch.float32
    return DTYPES[wanted]
