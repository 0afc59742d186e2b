"""The runner's tests share one set of checkpoints and one thread."""

from __future__ import annotations

import torch

from tests.runner.tiny_models import checkpoint  # noqa: F401  (a fixture)

torch.set_num_threads(1)  # tests run beside each other: more threads would wait for each other
