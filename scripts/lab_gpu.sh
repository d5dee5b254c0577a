#!/usr/bin/env bash
# The lab on a CUDA device, within a time budget and without a network: speed, accuracy and memory of every kernel, then the bytes they
# move by the GPU's own counters. Results go to $OUT, a short table is printed last.
#   OUT=results PYTHON=python3 BUDGET=400 scripts/lab_gpu.sh
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-lab-output}
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-400}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
rows="$OUT/lab-gpu-times.jsonl" merged="$OUT/lab-gpu.jsonl" plan="$OUT/lab-plan.json" csv="$OUT/lab-ncu.csv"
rm -f "$rows" "$merged" "$plan" "$csv"

begin=$SECONDS
left() { echo $((BUDGET - (SECONDS - begin))); }

timeout $((BUDGET * 11 / 20)) "$PYTHON" -m tilewise.lab.gpu --out "$rows" --budget $((BUDGET * 9 / 20)) 2>&1 | tee "$OUT/lab-gpu.log"

ncu=$(command -v ncu || find /usr/local/cuda*/bin /opt/nvidia/nsight-compute -name ncu -type f 2>/dev/null | sort | tail -1)
profile() { # the metrics to ask for
  rm -f "$plan" "$csv"
  local seconds
  seconds=$(($(left) - 10))
  timeout "$seconds" "$ncu" --clock-control none --profile-from-start off --print-units base --csv --log-file "$csv" --metrics "$1" \
    "$PYTHON" -m tilewise.lab.profile launch --plan "$plan" --budget $((seconds * 3 / 4)) >"$OUT/lab-profile.log" 2>&1
  grep -q '^"ID"' "$csv"
}
if [ -z "$ncu" ]; then
  echo "no ncu on this machine: bytes are predicted only"
elif profile "$("$PYTHON" -m tilewise.lab.profile metrics)" || profile "$("$PYTHON" -m tilewise.lab.profile metrics --fallback)"; then
  "$PYTHON" -m tilewise.lab.profile merge --csv "$csv" --plan "$plan" --rows "$rows" --out "$merged"
else
  echo "the profiler gave no table:"
  tail -5 "$csv" "$OUT/lab-profile.log"
fi
[ -f "$merged" ] || cp "$rows" "$merged"
echo "$((SECONDS - begin)) s; rows in $merged"
