"""From a model's name to its weights: resolving, pulling, reading safetensors."""
