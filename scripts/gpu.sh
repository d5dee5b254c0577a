#!/usr/bin/env bash
# What `make gpu` runs: the GPU tests, then the benchmark, its short tables last. Works on a machine without a network.
#
# Options are environment variables:
#   TESTS=1            0 leaves the tests out             TEST_BUDGET=420   seconds for all of them
#   TEST_ARGS=         more arguments for pytest          TEST_JOBS=        processes, by default one a core, 16 at most
#   BENCH=1            0 leaves the benchmark out         BENCH_BUDGET=240  seconds for all of it, ends with what it has
#   CASES=...          groups or id patterns, in order    PASSES=fwd,bwd    of fwd,bwd,fwd+bwd
#   PROVIDERS=...      ours and the peers to time         BENCH_ARGS=       more arguments for the benchmark
#   OUT=.out           logs; where it is given the results file too, which else goes to benchmarks/results/
#   PYTHON=python3     an interpreter whose torch sees the GPU
#   PEERS_DIR=/tmp/tilewise-peers   where packages from .peers*/ are unpacked (scripts/pack_peers.sh gathers them)
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
PEERS_DIR=${PEERS_DIR:-/tmp/tilewise-peers}
logs=${OUT:-.out}
mkdir -p "$logs"

# Packages brought along: wheels beside the interpreter's own, FlashAttention-4 once all its parts have arrived.
if compgen -G ".peers/wheels/*.whl" >/dev/null && [[ ! -e $PEERS_DIR/site.done ]]; then
  "$PYTHON" -m pip install -q --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
    --target "$PEERS_DIR/site" .peers/wheels/*.whl && touch "$PEERS_DIR/site.done"
fi
if compgen -G ".peers_fa4_*/fa4.part.*" >/dev/null; then
  mkdir -p "$PEERS_DIR/parts"
  for part in .peers_fa4_*/fa4.part*; do cp "$part" "$PEERS_DIR/parts/"; done
fi
if [[ -e $PEERS_DIR/parts/fa4.parts && ! -e $PEERS_DIR/fa4.done ]]; then
  parts=("$PEERS_DIR"/parts/fa4.part.*)
  if ((${#parts[@]} == $(<"$PEERS_DIR/parts/fa4.parts"))); then
    mkdir -p "$PEERS_DIR/fa4"
    cat "${parts[@]}" | xz -dc | tar x -C "$PEERS_DIR/fa4" && touch "$PEERS_DIR/fa4.done"
  else
    echo "FlashAttention-4: ${#parts[@]} of $(<"$PEERS_DIR/parts/fa4.parts") parts are here"
  fi
fi
[[ -e $PEERS_DIR/fa4.done ]] && export FA4_DIR="$PEERS_DIR/fa4"
# What FlashAttention-4 compiles is kept for the next run.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="$PEERS_DIR/fa4-compiled"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}:$PEERS_DIR/site" PYTHONUNBUFFERED=1

"$PYTHON" - <<'PY' || exit 1
import sys, torch
if not torch.cuda.is_available():
    sys.exit("make gpu needs a CUDA device that torch sees; torch " + torch.__version__ + " sees none")
print(torch.cuda.get_device_name(), "torch", torch.__version__, "python", sys.version.split()[0])
PY

status=0
if [[ ${TESTS:-1} == 1 ]]; then
  jobs=()
  "$PYTHON" -c "import xdist" 2>/dev/null && jobs=(-n "${TEST_JOBS:-$(($(nproc) < 16 ? $(nproc) : 16))}" --dist worksteal)
  limit=()
  # By a thread: what waits for a kernel that hangs never comes back to Python, where a signal would be handled.
  if "$PYTHON" -c "import pytest_timeout" 2>/dev/null; then
    limit=(--timeout 120 --timeout-method thread)
  else
    echo "without pytest-timeout a kernel that hangs ends the tests only after ${TEST_BUDGET:-420} s"
  fi
  eval "more=(${TEST_ARGS:-})" # words with quotes, such as -k 'not hopper'
  timeout --signal INT --kill-after 10 "${TEST_BUDGET:-420}" "$PYTHON" -m pytest tests/gpu tests/test_lab.py -m gpu -p no:cacheprovider \
    "${jobs[@]}" "${limit[@]}" --tb short -ra --durations 8 --disable-warnings "${more[@]}" >"$logs/gpu-tests.log" 2>&1 || status=$?
  grep -E "^(FAILED|ERROR)" "$logs/gpu-tests.log" | cut -c1-200 | head -25
  tail -n 12 "$logs/gpu-tests.log" | cut -c1-160
  echo "tests: exit status $status, $SECONDS s so far; all of it in $logs/gpu-tests.log"
fi

if [[ ${BENCH:-1} == 1 ]]; then
  if [[ -n ${OUT:-} ]]; then
    results=$OUT/results.jsonl
  else
    device=$("$PYTHON" -c "import re, torch; print(re.sub('[^a-z0-9]+', '-', torch.cuda.get_device_name().lower()))")
    results=benchmarks/results/$device-$(date +%Y-%m-%d).jsonl
  fi
  eval "more=(${BENCH_ARGS:-})"
  "$PYTHON" -m tilewise.bench run --device cuda --out "$results" --budget "${BENCH_BUDGET:-240}" --passes "${PASSES:-fwd,bwd}" \
    --cases "${CASES:-paper,short,gqa,window,mla,bias,fp32,host,memory,first_call}" \
    --providers "${PROVIDERS:-tilewise,sdpa_flash,sdpa_cudnn,fa3,fa4,flex,sdpa_efficient,eager}" "${more[@]}" \
    >"$logs/bench.log" 2>"$logs/bench.err" || { status=1; tail -n 20 "$logs/bench.err"; }
  sed -n '1,/providers:/p;/^  without/p' "$logs/bench.log" | head -20
  # The tables stand after the measurements, from the first header on.
  if grep -q "^case  *pass" "$logs/bench.log"; then sed -n '/^case  *pass/,$p' "$logs/bench.log"; else tail -n 40 "$logs/bench.log"; fi | tail -c 8500
  echo "rows in $results, every measurement in $logs/bench.log, $SECONDS s in all"
fi
exit "$status"
