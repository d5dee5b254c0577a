#!/usr/bin/env bash
# The lab on a CUDA device, within a time budget and without a network: speed, accuracy and memory of every kernel, then the bytes they
# move by the GPU's own counters. Needs torch and Triton alone; without ncu, or where it may not read the counters, bytes stay predicted.
# Every row is written when it is measured, so a run that is cut off leaves what it has.
#   OUT=results PYTHON=python3 BUDGET=400 scripts/lab_gpu.sh
# $OUT/lab-gpu.jsonl is the results file; as benchmarks/results/lab-DEVICE.jsonl it is what scripts/lab_docs.py draws.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-lab-output}
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-400}
PARTS=${PARTS:-4} # of the profile: each is a process of its own whose table is kept
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
merged="$OUT/lab-gpu.jsonl" table="$OUT/lab-gpu.txt"
rm -f "$OUT"/lab-gpu* "$OUT"/lab-ncu* "$OUT"/lab-plan*

begin=$SECONDS
left() { echo $((BUDGET - (SECONDS - begin))); }

timeout --kill-after 10 $((BUDGET * 11 / 20 + 10)) "$PYTHON" -m tilewise.lab.gpu --out "$merged" --budget $((BUDGET * 11 / 20)) \
  >"$OUT/lab-gpu.log" 2>&1
status=$?
grep -E "budget of|Error|unsupported| oom| wrong" "$OUT/lab-gpu.log" | cut -c1-240 | tail -n 20
if [ ! -s "$merged" ]; then
  echo "nothing was measured (exit status $status):"
  tail -n 15 "$OUT/lab-gpu.log"
  exit 1
fi
echo "$(wc -l <"$merged") rows after $((SECONDS - begin)) s, exit status $status"

ncu=$(command -v ncu || find /usr/local/cuda*/bin /opt/nvidia/nsight-compute* /usr/lib/nsight-compute* -name ncu 2>/dev/null | sort | tail -n 1)
run_ncu() { # seconds, metrics, file for the table, then the command of lab.profile
  timeout --kill-after 10 "$1" "$ncu" --clock-control none --profile-from-start off --print-units base --csv --log-file "$3" --metrics "$2" \
    "$PYTHON" -m tilewise.lab.profile "${@:4}" >>"$OUT/lab-profile.log" 2>&1
  grep -q '^"ID"' "$3" 2>/dev/null
}
metrics="" probed="$OUT/lab-ncu-probe.txt"
if [ -z "$ncu" ]; then
  echo "no ncu on this machine: bytes are predicted only"
elif (($(left) < 60)); then
  echo "$(left) s left, too little for a profile: bytes are predicted only"
else
  : >"$OUT/lab-profile.log"
  for choice in "" --fallback; do
    asked=$("$PYTHON" -m tilewise.lab.profile metrics $choice)
    if run_ncu 45 "$asked" "$probed" probe; then
      metrics=$asked
      break
    fi
    if grep -q ERR_NVGPUCTRPERM "$probed" "$OUT/lab-profile.log" 2>/dev/null; then
      echo "ncu may not read the GPU's counters here (ERR_NVGPUCTRPERM)"
      break
    fi
  done
  if [ -z "$metrics" ]; then
    echo "the profiler gave no table, so bytes are predicted only; it says:"
    tail -qn 4 "$probed" "$OUT/lab-profile.log" 2>/dev/null | cut -c1-300
  fi
fi

if [ -n "$metrics" ]; then
  csvs=() plans=()
  cp "$merged" "$OUT/lab-gpu-times.jsonl"
  for ((part = 1; part <= PARTS; part++)); do
    share=$(((BUDGET - (SECONDS - begin) - 10) / (PARTS - part + 1)))
    ((share < 20)) && echo "budget spent before part $part of $PARTS of the profile" && break
    csv="$OUT/lab-ncu-$part.csv" plan="$OUT/lab-plan-$part.json"
    # A process takes seconds to start and to write its table.
    if run_ncu $((share + 8)) "$metrics" "$csv" launch --plan "$plan" --part "$part/$PARTS" --budget $((share * 7 / 10)) && [ -s "$plan" ]; then
      csvs+=("$csv") plans+=("$plan")
      "$PYTHON" -m tilewise.lab.profile merge --csv "${csvs[@]}" --plan "${plans[@]}" --rows "$OUT/lab-gpu-times.jsonl" \
        --out "$merged.part" >"$table" && mv "$merged.part" "$merged"
      echo "part $part of $PARTS profiled, $((SECONDS - begin)) s so far"
    else
      echo "part $part of $PARTS of the profile gave no table:"
      tail -qn 2 "$csv" "$OUT/lab-profile.log" 2>/dev/null | cut -c1-300
    fi
  done
  [ -s "$table" ] && cat "$table"
fi
echo "$((SECONDS - begin)) s; $(wc -l <"$merged") rows in $merged"
