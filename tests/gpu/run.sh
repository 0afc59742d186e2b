#!/usr/bin/env bash
# Everything about a GPU that can be checked in eight minutes, into one JSON. Needs nothing but
# Python with torch, triton, transformers, safetensors and numpy; flash-attn is used where it is.
#   tests/gpu/run.sh                writes ./gpu.json, or $OUT/gpu.json where OUT is a folder
#   MINUTES=4 tests/gpu/run.sh      stops starting parts after 4 minutes
# Ends with 0 if nothing that could run went wrong, 1 if something did, 2 without a CUDA device.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET
exec "${PYTHON:-python3}" -m tests.gpu.check --out "${OUT:-.}/gpu.json" --minutes "${MINUTES:-7.5}" "$@"
