#!/usr/bin/env bash
# Gathers what a GPU machine without a network needs for `scripts/gpu.sh`: the test tools and the peer libraries that do not come
# with torch. Everything lands in git-ignored folders of the repository, each small enough to travel by itself:
#   .peers/wheels/       pytest and its plugins, rich, typer, NVIDIA's management bindings, FlashAttention-3 (forward only)
#   .peers_fa4_1/, _2/   the two halves of FlashAttention-4 (CuTe DSL) and its needs, an xz archive cut in parts
# scripts/gpu.sh unpacks what it finds; FlashAttention-4 is used only where all its parts are present.
#
# Usage: scripts/pack_peers.sh [tools] [fa3] [fa4]        all three without arguments
#   PY_VERSION   Python of the GPU machine, default 3.12 (x86-64 Linux)
set -euo pipefail
cd "$(dirname "$0")/.."
what=" ${*:-tools fa3 fa4} "
PYTHON=${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}
PY_VERSION=${PY_VERSION:-3.12}
part_bytes=54000000

platforms=()
for glibc in 39 35 34 31 28 27 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64)

# download FOLDER REQUIREMENT...: these wheels and none of their needs.
download() {
  local folder=$1
  shift
  "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version "$PY_VERSION" --implementation cp "${platforms[@]}" -d "$folder" "$@"
}

tools=(pytest pluggy iniconfig packaging pygments pytest-xdist execnet pytest-timeout hypothesis sortedcontainers
  rich markdown-it-py mdurl typer click shellingham annotated-doc annotated-types typing-inspection
  pydantic==2.14.4 pydantic-core==2.50.5
  typing-extensions nvidia-ml-py)
fa4=(flash-attn-4==4.0.0b36 quack-kernels==0.6.5 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
  nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1
  nvidia-cutlass-dsl-libs-cu13==4.8.1)

mkdir -p .peers/wheels
if [[ $what == *" tools "* ]]; then download .peers/wheels "${tools[@]}"; fi
if [[ $what == *" fa3 "* ]]; then download .peers/wheels fa3-fwd==0.0.3; fi
if [[ $what == *" fa4 "* ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  download "$work/wheels" "${fa4[@]}"
  for wheel in "$work"/wheels/*.whl; do "$PYTHON" -m zipfile -e "$wheel" "$work/tree"; done
  tar c -C "$work/tree" . | xz -T2 -9 | split -b "$part_bytes" -d - "$work/fa4.part."
  parts=("$work"/fa4.part.*)
  rm -rf .peers_fa4_*
  for i in "${!parts[@]}"; do
    mkdir ".peers_fa4_$((i + 1))"
    mv "${parts[$i]}" ".peers_fa4_$((i + 1))/"
    echo "${#parts[@]}" >".peers_fa4_$((i + 1))/fa4.parts" # how many make the whole
  done
fi
du -sh .peers .peers_fa4_* 2>/dev/null || true
