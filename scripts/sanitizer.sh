#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over the small calls of scripts/sanitizer_cases.py, forward and backward: memcheck, then racecheck, each call in
# a process of its own and as many at a time as there are cores. Every tensor is an allocation of its own, so that one byte too far is seen.
# Prints a line for each call and tool; then every race once, with the number of calls that showed it: of the kernels with
# `warp_specialize` one byte is known, by which Triton tells the worker warps their role (docs/hopper-forward.md). A race between stages of a
# ring or of tiles would name another pair of instructions.
# Exit status: 0; 1 where memcheck found an error or a call did not finish; 2 without the tool. Hazards alone do not change it.
#
# Options are environment variables:
#   CASES=.            the calls whose name matches this expression
#   TOOLS="memcheck racecheck"
#   OUT=.out           for sanitizer.txt (what is printed) and the full memcheck.log and racecheck.log
#   LIMIT=60           seconds for one call and tool
#   JOBS=              processes at a time, by default one a core
#   PYTHON=python3     an interpreter whose torch sees the GPU
#   SANITIZER=         compute-sanitizer, where it is not found by itself
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python3} TOOLS=${TOOLS:-memcheck racecheck} LIMIT=${LIMIT:-60}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1

one() { # name: every tool over one call; the second tool finds the kernels that the first one compiled
  local name=$1 tool log said status found what gap
  for tool in $TOOLS; do
    log="$work/$name.$tool" what=hazards gap=""
    [[ $tool == memcheck ]] && what=errors gap=$padding
    # shellcheck disable=SC2086
    timeout --kill-after 5 "$LIMIT" "$sanitizer" --tool "$tool" $flags $gap "$PYTHON" scripts/sanitizer_cases.py "$name" >"$log" 2>&1
    status=$?
    found=$(grep -oE "(ERROR|RACECHECK) SUMMARY: [0-9]+" "$log" | grep -oE "[0-9]+$" | tail -n 1)
    if ((status == 124 || status == 137)); then
      said="not finished in $LIMIT s"
    elif [[ -z $found ]]; then
      said="no summary, exit status $status: $(grep -vE "^=* *$" "$log" | tail -n 1 | cut -c1-160)"
    elif ((found > 0)); then
      said="$found $what"
    elif ((status != 0)); then
      said="the call failed: $(grep -vE "^=========|^ *$" "$log" | tail -n 1 | cut -c1-160)"
    else
      said="0 $what"
    fi
    printf '%-10s %-36s %s\n' "$tool" "$name" "$said" | tee "$log.line"
  done
}

if [[ ${1:-} == --one ]]; then
  one "$2"
  exit
fi

# In the PATH, a CUDA toolkit, or a wheel of it beside torch.
packages=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" 2>/dev/null)
export sanitizer=${SANITIZER:-$(command -v compute-sanitizer || find /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer /opt/cuda*/bin \
  ${packages:+"$packages"/nvidia*} -name compute-sanitizer \( -type f -o -type l \) 2>/dev/null | sort | tail -n 1)}
if [[ -z $sanitizer || ! -x $sanitizer ]]; then
  echo "compute-sanitizer is not here${SANITIZER:+: $SANITIZER}: neither in the PATH nor in /usr/local/cuda or a wheel beside torch. It comes with the" \
    "CUDA toolkit; SANITIZER=/path/to/compute-sanitizer names one."
  exit 2
fi
# Not of every release. torch asks the driver questions that may fail; ptxas and other children run nothing on the device; and behind each
# allocation a gap, so that a reader that goes too far does not land in the next one.
known=$("$sanitizer" --help 2>&1)
export flags="" padding=""
[[ $known == *--report-api-errors* ]] && flags+=" --report-api-errors no"
[[ $known == *--target-processes* ]] && flags+=" --target-processes application-only"
[[ $known == *--padding* ]] && padding="--padding 4096"

OUT=${OUT:-.out}
mkdir -p "$OUT"
export work
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
listed=$("$PYTHON" scripts/sanitizer_cases.py) || exit 1
chosen=$(grep -E -- "${CASES:-.}" <<<"$listed") || { echo "no call is named like ${CASES:-.}"; exit 1; }
{
  tr '\n' '\0' <<<"$chosen" | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash "scripts/$(basename "${BASH_SOURCE[0]}")" --one {}
  calls=$(wc -l <<<"$chosen")
  for tool in $TOOLS; do
    clean=$(cat "$work"/*."$tool".line | grep -cE " 0 (errors|hazards)$")
    echo "$tool: nothing found in $clean of $calls calls"
  done
  if [[ " $TOOLS " == *" racecheck "* ]]; then
    races=$(for log in "$work"/*.racecheck; do
      awk '
        /^=+ +(Error|Warning): Race reported/ { if (race) print race; race = $0; next }
        race && /^=+ +and / { race = race $0; next }
        { if (race) print race; race = "" }
        END { if (race) print race }' "$log" | sed -E 's/=========//g; s/\[[0-9,]+ hazards?\]//g; s/[[:space:]]+/ /g; s/^ | $//g' | sort -u
    done | sort | uniq -c | sort -rn)
    [[ -n $races ]] && printf 'races, and in how many calls:\n%s\n' "$races"
  fi
  echo "$SECONDS s; all of it in $OUT"
} | tee "$OUT/sanitizer.txt"
for tool in $TOOLS; do
  for log in "$work"/*."$tool"; do printf '\n######## %s\n' "$(basename "$log" ".$tool")" && cat "$log"; done >"$OUT/$tool.log"
done
# Hazards are for reading; anything else that is not a zero is a failure.
! cat "$work"/*.line | grep -vqE " 0 (errors|hazards)$| [0-9]+ hazards$"
