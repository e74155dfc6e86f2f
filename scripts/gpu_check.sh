#!/usr/bin/env bash
# Builds with CUDA and runs the component tests, the GPU tests, compute-sanitizer and the benchmarks, on a machine with
# an NVIDIA GPU. Results go to build-gpu/results as JSON, JUnit and log files.
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
benches='linear experts step_ops attention stream'
say() { printf '\n==> %s (%d s)\n' "$*" $SECONDS; }
rocket() { PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} "$python" -c 'from rocket.cli import main; main()' "$@"; }

component_tests() {
  ctest --test-dir $build -j 4 --output-on-failure -L gpu --output-junit results/ctest.xml > $results/ctest.log
}

python_tests() {  # name of the results, arguments
  local name=$1
  shift
  PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} "$python" -m pytest -q -m gpu --durations=8 \
    --junitxml=$results/$name.xml "$@" > $results/$name.log 2>&1
}

# One case in eight of each program, by both tools. Not of test_gpu_slot_disk: its kernels wait for a thread of the host,
# within limits of time that are far exceeded under the tools.
sanitizers() {
  find $build -maxdepth 1 -name 'test_gpu_*' -type f | grep -v slot_disk | sort | sed 's/^\(.*\)$/memcheck \1\nracecheck \1/' |
    ROCKET_TEST_SMALL=1 xargs -P 8 -L 1 bash -c '
      log=$1/$2-$(basename "$3").log
      timeout 200 compute-sanitizer --tool "$2" --error-exitcode 9 "$3" > "$log" 2>&1 && exit 0
      echo "$2: $3 failed, status $?"; grep -E "=========|FAIL" "$log" | head -8; exit 1
    ' _ $results > $results/sanitizers.log
}

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
targets='gpu_tests _core'
[ -n "$quick" ] || targets="$targets bench_gpu_step $(printf 'bench_gpu_%s ' $benches)"
cmake --build $build -j "$(nproc)" --target $targets > $results/build.log 2>&1 ||
  { grep -E "error|\*\*\*|FAILED" $results/build.log | head -20; exit 1; }

status=0
say "component tests"
component_tests || status=1
grep -E "FAIL|SKIP|tests passed|Failed|\*\*\*" $results/ctest.log | grep -v "^ok" | head -60 || true

# Kernels that wait for the host keep others from the GPU meanwhile, and are kept from it themselves: these run alone.
say "GPU tests, those that wait for the host"
waiting='tests/test_gpu_expert_disk.py tests/test_gpu_boosters.py'
python_tests waiting $waiting || status=1
tail -16 $results/waiting.log

# Nothing here is timed, so all of it runs at once.
say "GPU tests and compute-sanitizer"
parallel=''
"$python" -c 'import xdist' 2> /dev/null && parallel='-n 8 --dist loadgroup -p no:benchmark'  # benchmarks warn beside pytest-xdist
python_tests pytest $(printf -- '--ignore %s ' $waiting) $parallel & pythons=$!
sanitizing=''
if [ -z "$quick" ]; then
  if command -v compute-sanitizer > /dev/null; then
    sanitizers & sanitizing=$!
  else
    echo "SKIP compute-sanitizer: it is not installed"
  fi
fi
wait $pythons || status=1
tail -30 $results/pytest.log
say "GPU tests done"
if [ -n "$sanitizing" ]; then
  wait $sanitizing || status=1
  cat $results/sanitizers.log
  say "compute-sanitizer done, $(find $results -name '*check-test_gpu_*.log' | wc -l) runs"
fi

if [ -z "$quick" ]; then
  say "benchmarks of the ops"
  rm -f $results/ops.jsonl
  for name in $benches; do
    ROCKET_BENCH_OUT=$results/ops.jsonl $build/bench_gpu_$name > $results/bench_gpu_$name.log || status=1
  done
  grep -hE "1 row |rows 1,|rows 1 |read rate|cudaMemcpy|fetch|waves" $results/bench_gpu_*.log || true

  say "decode"
  rocket bench decode --backend cuda --fuel sparkler --json > $results/decode-sparkler.json || status=1
  if [ -n "$slice" ]; then
    [ -z "$making" ] || wait $making || { cat $results/make_slice.log; exit 1; }
    for streams in 1 8; do
      rocket bench decode --backend cuda --fuel "$slice" --prompt 512 --chunk 512 --streams $streams --json \
        > $results/decode-slice-$streams.json || status=1
    done
    $build/bench_gpu_step "$slice" 512 40 8 | tee $results/step-slice.log || status=1
    # Half of its experts in slots, the others in a bank of pinned memory.
    $build/bench_gpu_step "$slice" 64 40 1 720 | tee $results/step-slice-half.log || status=1
  fi
fi
[ -z "$making" ] || wait $making || true
say "done, status $status"
exit $status
