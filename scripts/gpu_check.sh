#!/usr/bin/env bash
# Builds with CUDA and runs the component tests, the GPU tests, compute-sanitizer and the benchmarks, on a machine with
# an NVIDIA GPU. Results go to build-gpu/results as JSON and JUnit files.
#
#   scripts/gpu_check.sh [--quick] [--slice DIR] [PYTHON]
#     --quick      no sanitizer, no benchmarks
#     --slice DIR  where the 8-layer slice of GLM-5.3-Flash lies or is made (25 GB); without it, it is not measured
#
# Needs nvcc, CMake, and a Python with pybind11, pytest and the packages of `pip install '.[test]'`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick='' slice='' python=python3
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 ;;
    --slice) slice=${2:?--slice needs a directory}; shift ;;
    -*) echo "gpu_check.sh: unknown option $1" >&2; exit 2 ;;
    *) python=$1 ;;
  esac
  shift
done
build=build-gpu
results=$build/results
say() { printf '\n==> %s (%d s)\n' "$*" $SECONDS; }
rocket() { PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} "$python" -c 'from rocket.cli import main; main()' "$@"; }

command -v nvidia-smi >/dev/null || { echo "gpu_check.sh: no NVIDIA driver here: nvidia-smi is missing" >&2; exit 1; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
mkdir -p $results
making=''
if [ -n "$slice" ] && [ ! -f "$slice/config.json" ]; then
  PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} "$python" scripts/make_fuel.py "$slice" --preset flash-slice > $results/make_slice.log 2>&1 &
  making=$!
fi

say "build"
cmake -S . -B $build -DROCKET_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")" > $results/configure.log
cmake --build $build -j "$(nproc)" 2>&1 | grep -E "error|warning|\*\*\*|FAILED" || true
cmake --build $build -j "$(nproc)" > /dev/null

status=0
say "component tests"
ctest --test-dir $build --output-on-failure -L gpu --output-junit results/ctest.xml > $results/ctest.log || status=1
grep -E "FAIL|SKIP|tests passed|Passed|Failed|\*\*\*" $results/ctest.log | grep -v "^ok" | head -60 || true

say "GPU tests"
parallel=''
"$python" -c 'import xdist' 2> /dev/null && parallel='-n 8 -p no:benchmark'  # pytest-xdist; benchmarks warn beside it
PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -m gpu $parallel --junitxml=$results/pytest.xml > $results/pytest.log 2>&1 || status=1
tail -40 $results/pytest.log

if [ -z "$quick" ]; then
  if command -v compute-sanitizer > /dev/null; then
    for tool in memcheck racecheck; do
      say "compute-sanitizer $tool, one case in eight"
      find $build -maxdepth 1 -name 'test_gpu_*' -type f | sort | ROCKET_TEST_SMALL=1 xargs -P 4 -I{} bash -c '
        log=$1/$2-$(basename "$3").log
        timeout 150 compute-sanitizer --tool "$2" --error-exitcode 9 "$3" > "$log" 2>&1 ||
          { echo "$2: $(basename "$3") failed, status $?"; grep -E "=========|FAIL" "$log" | head -8; exit 1; }
      ' _ $results $tool {} || status=1
    done
  else
    echo "SKIP compute-sanitizer: it is not installed"
  fi

  say "benchmarks of the ops"
  rm -f $results/ops.jsonl
  for file in ctest/bench_gpu_*.cpp; do
    name=$(basename "$file" .cpp)
    cmake --build $build -j "$(nproc)" --target "$name" > /dev/null
    ROCKET_BENCH_OUT=$results/ops.jsonl "$build/$name" | tee "$results/$name.log" || status=1
  done

  say "decode"
  rocket bench decode --backend cuda --fuel sparkler --json | tee $results/decode-sparkler.json
  if [ -n "$slice" ]; then
    [ -z "$making" ] || wait $making || { cat $results/make_slice.log; exit 1; }
    for streams in 1 8; do
      rocket bench decode --backend cuda --fuel "$slice" --prompt 512 --chunk 512 --streams $streams --json |
        tee $results/decode-slice-$streams.json
    done
    # Half of its experts in slots, the rest in the host's memory.
    "$build/bench_gpu_step" "$slice" 64 64 8 720 | tee $results/step-slice-half.log || status=1
  fi
fi
[ -z "$making" ] || wait $making || true
say "done, status $status"
exit $status
