"""The engine held against transformers, operation by operation, and faults to try that on."""
