#!/usr/bin/env bash
# Builds with CUDA and runs the component tests, the GPU tests, compute-sanitizer and the benchmarks, on a machine with
# an NVIDIA GPU. Results go to build-gpu/results, which is emptied first, as JSON, JUnit and log files; summary.json there
# has what was tested, on what, how long each phase took, and the status. A test that is skipped is not a test that passed:
# of the component tests none may be, and of Python's none for want of a GPU.
#
#   scripts/gpu_check.sh [--quick] [--slice DIR] [PYTHON]
#     --quick      no sanitizer, no benchmarks
#     --slice DIR  where the 8-layer slice of GLM-5.3-Flash lies or is made (25 GB); without it, it is not measured
#
# Needs nvcc, CMake, compute-sanitizer, and a Python with pybind11, pytest and the packages of `pip install '.[test]'`.
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
status=0
making=''  # the process that makes the slice
beside=()  # groups of processes that run beside this script
under_way='' began=0
phases=()  # names and seconds of those that are done
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
export ROCKET_TEST_GPU=required
say() { printf '\n==> %s (%d s)\n' "$*" $SECONDS; }
phase() {
  [ -z "$under_way" ] || phases+=("$under_way" $((SECONDS - began)))
  under_way=$1 began=$SECONDS
  [ -z "$under_way" ] || say "$under_way"
}
rocket() { PYTHONPATH=$build/python${PYTHONPATH:+:$PYTHONPATH} "$python" -c 'from rocket.cli import main; main()' "$@"; }

# Names each component test that did not run; fails if there is one, or no test at all.
all_ran() {
  "$python" - $results/ctest.xml << 'END'
import sys
from xml.etree import ElementTree

cases = list(ElementTree.parse(sys.argv[1]).getroot().iter("testcase"))
left = [c.get("name") for c in cases if c.find("skipped") is not None or c.get("status") in ("notrun", "disabled")]
for name in left:
    print(f"NOT RUN: {name}")
if not cases:
    print("NOT RUN: there is no component test")
sys.exit(1 if left or not cases else 0)
END
}

component_tests() {
  local failed=0
  ctest --test-dir $build -j 4 --output-on-failure -L gpu --output-junit results/ctest.xml > $results/ctest.log || failed=1
  all_ran || failed=1
  return $failed
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

# Waits until the slice is made, if it is being made.
slice_made() {
  [ -n "$making" ] || return 0
  local maker=$making
  making=''
  wait "$maker" || { echo "the slice was not made:"; cat $results/make_slice.log; return 1; }
}

summary() {
  "$python" - $results/summary.json "$status" $SECONDS "$date" \
    "$(git rev-parse HEAD 2> /dev/null || true)" "$(git status --porcelain 2> /dev/null | head -1)" \
    "$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null || true)" \
    "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -1)" "${phases[@]}" << 'END'
import json, sys

file, status, seconds, date, commit, changed, gpus, driver, *phases = sys.argv[1:]
summary = {
    "status": int(status),
    "date": date,
    "commit": commit or None,
    "uncommitted_changes": bool(changed) if commit else None,
    "gpus": gpus.splitlines(),
    "driver": driver or None,
    "phases": [{"name": n, "seconds": int(s)} for n, s in zip(phases[::2], phases[1::2])],
    "seconds": int(seconds),
}
with open(file, "w") as out:
    out.write(json.dumps(summary, indent=2) + "\n")
END
}

# Starts a command as a group of processes of its own, so that all it starts can be stopped with it: $! is the group.
in_background() {
  set -m
  "$@" &
  set +m
  beside+=($!)
}

# However it ends: nothing it started goes on, and the summary is written.
finish() {
  local code=$? group
  trap - EXIT
  for group in "${beside[@]}"; do
    kill -- -"$group" 2> /dev/null || true
  done
  [ $code -eq 0 ] || status=$code
  if [ -n "$making" ]; then
    kill "$making" 2> /dev/null || true
    wait "$making" 2> /dev/null || true
    rm -rf "$(dirname "$slice")/.$(basename "$slice").partial-$making"
  fi
  phase ''
  summary || { echo "gpu_check.sh: the summary was not written" >&2; [ $status -ne 0 ] || status=1; }
  say "done, status $status"
  exit $status
}

rm -rf $results
mkdir -p $results
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
command -v nvidia-smi >/dev/null || { echo "gpu_check.sh: no NVIDIA driver here: nvidia-smi is missing" >&2; exit 1; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
if [ -n "$slice" ] && [ ! -f "$slice/config.json" ]; then
  PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} "$python" scripts/make_fuel.py "$slice" --preset flash-slice > $results/make_slice.log 2>&1 &
  making=$!
fi

phase "build"
cmake -S . -B $build -DROCKET_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")" > $results/configure.log
targets='gpu_tests _core'
[ -n "$quick" ] || targets="$targets bench_gpu_step $(printf 'bench_gpu_%s ' $benches)"
cmake --build $build -j "$(nproc)" --target $targets > $results/build.log 2>&1 ||
  { grep -E "error|\*\*\*|FAILED" $results/build.log | head -20; exit 1; }

phase "component tests"
component_tests || status=1
grep -E "FAIL|SKIP|tests passed|Failed|\*\*\*" $results/ctest.log | grep -v "^ok" | head -60 || true

# Kernels that wait for the host keep others from the GPU meanwhile, and are kept from it themselves: these run alone.
phase "GPU tests, those that wait for the host"
waiting='tests/test_gpu_expert_disk.py tests/test_gpu_boosters.py'
python_tests waiting $waiting || status=1
tail -16 $results/waiting.log

# Nothing here is timed, so all of it runs at once.
phase "GPU tests${quick:+, without compute-sanitizer}"
parallel=''
"$python" -c 'import xdist' 2> /dev/null && parallel='-n 8 --dist loadgroup -p no:benchmark'  # benchmarks warn beside pytest-xdist
in_background python_tests pytest $(printf -- '--ignore %s ' $waiting) $parallel
pythons=$!
sanitizing=''
if [ -z "$quick" ]; then
  if command -v compute-sanitizer > /dev/null; then
    in_background sanitizers
    sanitizing=$!
  else
    echo "NOT RUN: compute-sanitizer, which is not installed"
    status=1
  fi
fi
wait $pythons || status=1
tail -30 $results/pytest.log
if [ -n "$sanitizing" ]; then
  phase "compute-sanitizer, after the GPU tests beside it"
  wait $sanitizing || status=1
  cat $results/sanitizers.log
  echo "$(find $results -name '*check-test_gpu_*.log' | wc -l) runs of compute-sanitizer"
fi

if [ -z "$quick" ]; then
  phase "benchmarks of the ops"
  for name in $benches; do
    ROCKET_BENCH_OUT=$results/ops.jsonl $build/bench_gpu_$name > $results/bench_gpu_$name.log || status=1
  done
  grep -hE "1 row |rows 1,|rows 1 |read rate|NOT COLD|cudaMemcpy|fetch|waves" $results/bench_gpu_*.log || true

  phase "decode"
  rocket bench decode --backend cuda --fuel sparkler --json > $results/decode-sparkler.json || status=1
  if [ -n "$slice" ] && ! slice_made; then
    status=1
  elif [ -n "$slice" ]; then
    for streams in 1 8; do
      rocket bench decode --backend cuda --fuel "$slice" --prompt 512 --chunk 512 --streams $streams --json \
        > $results/decode-slice-$streams.json || status=1
    done
    ROCKET_BENCH_OUT=$results/step-slice.jsonl $build/bench_gpu_step "$slice" 512 40 8 | tee $results/step-slice.log || status=1
    # Half of its experts in slots, the others in a bank of pinned memory.
    ROCKET_BENCH_OUT=$results/step-slice-half.jsonl $build/bench_gpu_step "$slice" 64 40 1 720 |
      tee $results/step-slice-half.log || status=1
  fi
fi
slice_made || status=1
exit $status
