#!/usr/bin/env bash
# The lab on a CUDA device, within a time budget and without a network, from a checkout that is not installed: what
# `tilewise lab --device cuda --out` measures, with torch and Triton alone. A run that is cut off leaves the rows that it has.
#   OUT=results PYTHON=python3 BUDGET=400 scripts/lab_gpu.sh
# $OUT/lab-gpu.jsonl is the results file; as benchmarks/results/lab-DEVICE.jsonl it is what scripts/lab_docs.py draws.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-lab-output}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
rm -f "$OUT"/lab-gpu*
exec "${PYTHON:-python3}" -m tilewise.lab.measured --out "$OUT/lab-gpu.jsonl" --budget "${BUDGET:-400}" --parts "${PARTS:-4}"
