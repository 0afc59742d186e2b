"""Real execution of a Batch: inputs, KV cache, forward pass, sampling, text."""
