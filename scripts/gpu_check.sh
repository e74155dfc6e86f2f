#!/usr/bin/env bash
# Builds with CUDA and runs the component tests, the GPU tests, compute-sanitizer and the benchmarks, on a machine with
# an NVIDIA GPU; `--help` has the arguments. A test that is skipped is not a test that passed: of the component tests
# none may be, and of Python's none for want of a GPU.
#
# Whatever is long runs in the background, in a group of processes of its own, and is waited for: bash heeds a signal at
# once while it waits, but not while a command runs in its foreground. Nor does it surely heed one that meets a command
# substitution (its parser may be in the midst of that), so there is none where signals are trapped, but in subshells.
set -euo pipefail

usage() {
  cat << 'END'
scripts/gpu_check.sh [--quick] [--slice DIR] [PYTHON]

Builds with CUDA, tests and measures on a machine with an NVIDIA GPU.

  --quick      no sanitizer, no benchmarks
  --slice DIR  where the 8-layer slice of GLM-5.3-Flash lies or is made (26 GB); without it, it is not measured
  PYTHON       has pybind11, pytest and the packages of `pip install '.[test]'`; without it .venv/bin/python of the
               repository, or python3 where there is none

Needs nvcc, CMake, a C++ compiler and, unless --quick, compute-sanitizer. What is missing is listed before anything is
built. Results go to build-gpu/results of the repository, which is emptied first, as JSON, JUnit and log files;
summary.json there has what was tested, on what, how long each phase took, and the status.

Status: 0 all passed, 1 something failed, was not tested or is missing, 2 wrong arguments, 128 + N stopped by signal N.
END
}
usage_error() {
  printf 'gpu_check.sh: %s\n\nhint: scripts/gpu_check.sh --help\n' "$1" >&2
  exit 2
}

quick='' slice='' python=''
while [ $# -gt 0 ]; do
  case $1 in
    --quick) quick=1 ;;
    --slice)
      case ${2-} in '' | -*) usage_error "--slice needs a directory, found ${2-nothing}" ;; esac
      [ -z "$slice" ] || usage_error "a second --slice: $2"
      slice=$2
      shift
      ;;
    -h | --help) usage; exit 0 ;;
    -*) usage_error "unknown option $1" ;;
    '') usage_error "PYTHON is empty" ;;
    *)
      [ -z "$python" ] || usage_error "a second PYTHON: $1, after $python"
      python=$1
      ;;
  esac
  shift
done

# What was given is relative to where the user stands; from here on this is the root of the repository.
[ -z "$slice" ] || slice=$(realpath -m -- "$slice")
given=$python
if [ -n "$python" ]; then
  python=$(command -v -- "$python") || python=$given
  case $python in /*) ;; */*) python=$PWD/$python ;; esac
fi
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [ -z "$python" ]; then
  python=$PWD/.venv/bin/python
  [ -x "$python" ] || python=$(command -v python3) || python=python3
fi
case $python in */*) PATH=$PATH:$(dirname -- "$python") ;; esac  # pip installs a cmake beside its Python

build=build-gpu
results=$build/results
benches='linear experts step_ops attention stream'
slice_gb=27  # 26.3, rounded up
signals='HUP INT QUIT PIPE TERM'
status=0
commit=$(git rev-parse HEAD 2> /dev/null || true)
changed=$(git status --porcelain 2> /dev/null | head -1 || true)
cpus=$(nproc)
lacking=''  # something that is needed
making=''   # the process that makes the slice
partial=''  # what it has made so far, but for its number at the end
[ -z "$slice" ] || partial=$(dirname -- "$slice")/.$(basename -- "$slice").partial
under_way='' began=0
phases=()  # names and seconds of those that are done
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
mark=$$.$date  # in the environment of all that runs in the background, wherever it goes
export ROCKET_TEST_GPU=required
say() { printf '\n==> %s (%d s)\n' "$*" $SECONDS; }
phase() {
  [ -z "$under_way" ] || phases+=("$under_way" $((SECONDS - began)))
  under_way=$1 began=$SECONDS
  [ -z "$under_way" ] || say "$under_way"
}

# Starts a command as a group of processes of its own: $! is the group. It may write where `stty tostop` is set.
in_background() {
  set -m
  { trap '' TTOU; ROCKET_GPU_CHECK=$mark "$@"; } < /dev/null &
  set +m
}
run() {
  in_background "$@"
  wait $!
}

# All that was started and still runs: the groups, as -ID, and what left them (timeout does), which the mark shows.
started() {
  local group
  for group in $(jobs -p); do
    kill -0 -- "-$group" 2> /dev/null && echo "-$group"
  done
  grep -lzsF "ROCKET_GPU_CHECK=$mark" /proc/[0-9]*/environ | cut -d / -f 3
}
stop_all() {  # what cannot be stopped is in left
  local signal try
  for signal in TERM KILL; do
    for try in {0..49}; do  # of 0.1 s
      left=$(started)
      [ -n "$left" ] || return 0
      [ $((try % 10)) -ne 0 ] || kill -s $signal -- $left 2> /dev/null
      sleep 0.1
    done
  done
  return 1
}

summary() {
  timeout -s KILL 60 "$python" - $results/summary.json "$status" $SECONDS "$date" "$commit" "$changed" \
    $results/gpus.csv "${phases[@]}" << 'END'
import json, os, sys

file, status, seconds, date, commit, changed, answer, *phases = sys.argv[1:]
gpus = [line.strip().split(", ") for line in open(answer)][1:] if os.path.exists(answer) else []
summary = {
    "status": int(status),
    "date": date,
    "commit": commit or None,
    "uncommitted_changes": bool(changed) if commit else None,
    "gpus": [gpu[0] for gpu in gpus],
    "driver": gpus[0][-1] if gpus else None,
    "phases": [{"name": n, "seconds": int(s)} for n, s in zip(phases[::2], phases[1::2])],
    "seconds": int(seconds),
}
with open(file, "w") as out:
    out.write(json.dumps(summary, indent=2) + "\n")
END
}

# A subshell that a signal meets before it has laid the traps aside runs them too: it is to end, not to clean up. This is
# no `[ … ] || …`, as what the first command of a trap returns may be lost to the pipeline that the signal met.
only_the_script() {
  case $BASHPID in
    $$) ;;
    *) kill -s KILL $BASHPID ;;
  esac
}

# However it ends: nothing it started goes on, and the summary is written. Whoever stops it may signal more than once (a
# second Ctrl-C; timeout, which signals the script and its group): signals are ignored by then, and by what is started
# here.
finish() {  # the status
  only_the_script
  trap '' $signals
  trap - EXIT
  set +em
  local code=$1
  stop_all 2> /dev/null || echo "gpu_check.sh: cannot be killed:" $left >&2  # not what bash says of each that was
  [ -z "$making" ] || rm -rf -- "$partial-$making"
  [ $code -eq 0 ] || status=$code
  phase ''
  command -v "$python" > /dev/null || python=python3  # enough for the summary
  summary || { echo "gpu_check.sh: the summary was not written" >&2; [ $status -ne 0 ] || status=1; }
  say "done, status $status"
  exit $status
}
lack() {
  echo "gpu_check.sh: $*" >&2
  lacking=1
}
need() {  # a program, a hint
  command -v "$1" > /dev/null || lack "$1 is missing: expected in PATH; $2"
}
of_cuda() {  # where a program of the CUDA toolkit may be found
  local folder=/usr/local/cuda/bin
  if [ -x "$folder/$1" ]; then echo "it lies in $folder: PATH=$folder:\$PATH"; else echo "install the CUDA toolkit"; fi
}

# Asks nvidia-smi, once: where the driver is ill it takes minutes or does not end, and then it may not even be killed.
need_gpu() {
  local code=0 asked clock answer=$results/asked.csv
  if ! command -v nvidia-smi > /dev/null; then
    lack "nvidia-smi is missing: expected in PATH; install the NVIDIA driver"
    return
  fi
  nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv > $answer &
  asked=$!
  sleep 20 &
  clock=$!
  wait -n $asked $clock || code=$?
  if kill -0 $asked 2> /dev/null; then
    lack "nvidia-smi does not answer: expected within 20 s; the driver or a GPU hangs, see dmesg"
    return
  fi
  kill $clock 2> /dev/null || true
  if [ $code -ne 0 ]; then
    lack "nvidia-smi fails, status $code: $(head -1 $answer); is the driver loaded?"
  elif [ -z "$(tail -n +2 $answer)" ]; then
    lack "no NVIDIA GPU: nvidia-smi lists none; see dmesg"
  else
    mv $answer $results/gpus.csv
    cat $results/gpus.csv
  fi
}

# The Python, its headers, and the packages that pyproject.toml names. Status 3: it has said what is missing.
python_packages() {
  "$python" - << 'END'
import importlib
import re
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

NOT_IMPORTED = ("scikit-build-core", "cmake", "ninja")  # the first makes wheels, the others are programs
lacking = []


def numbers(version):
    return [int(n) for n in re.findall(r"\d+", version)]


def check(name, least):
    pip = f"{sys.executable} -m pip install '{name}>={least}'"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as e:
        lacking.append(f"{name} is missing: {e}, expected in {sys.executable}; {pip}")
        return
    except Exception as e:
        lacking.append(f"{name} cannot be imported in {sys.executable}: {' '.join(str(e).split())[:200]}; {pip}")
        return
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:  # a source tree in PYTHONPATH
        return
    if numbers(found) < numbers(least):
        lacking.append(f"{name} {found} is too old: expected {least} or later in {sys.executable}; {pip}")


if sys.version_info < (3, 10):
    found = ".".join(map(str, sys.version_info[:3]))
    print(f"gpu_check.sh: {sys.executable} is too old: expected 3.10, found {found}; name another", file=sys.stderr)
    sys.exit(3)
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    lacking.append(f"Python.h is missing: expected in {sysconfig.get_path('include')}; install python3-dev")
project = Path("pyproject.toml").read_text(encoding="utf-8")
for key in ("requires", "dependencies", "test"):
    packages = re.search(rf"^{key} = \[(.*?)\]", project, re.M | re.S)[1]
    for name, least in re.findall(r'"([\w.-]+)>=([\d.]+)', packages):
        if name not in NOT_IMPORTED:
            check(name, least)
for line in lacking:
    print(f"gpu_check.sh: {line}", file=sys.stderr)
sys.exit(3 if lacking else 0)
END
}
need_python() {
  local code=0
  if ! command -v "$python" > /dev/null; then
    lack "${given:-$python} is missing: no program to run; name the Python to use as PYTHON"
    return
  fi
  echo "Python: $python"
  python_packages || code=$?
  case $code in
    0) ;;
    3) lacking=1 ;;
    *) lack "$python cannot be run, status $code: expected a Python; name another as PYTHON" ;;
  esac
}

# If the slice must be made: in the nearest folder above it that exists there must be leave and room to.
need_slice() {
  local folder room
  [ -n "$slice" ] && [ ! -f "$slice/config.json" ] || return 0
  if [ -e "$slice" ] && { [ ! -d "$slice" ] || [ -n "$(ls -A -- "$slice")" ]; }; then
    lack "--slice $slice: neither a fuel nor an empty or new directory; choose another, or remove it"
    return
  fi
  folder=$(dirname -- "$slice")
  while [ ! -e "$folder" ]; do folder=$(dirname -- "$folder"); done
  if [ ! -d "$folder" ] || [ ! -w "$folder" ] || [ ! -x "$folder" ]; then
    lack "--slice $slice: nothing can be written to $folder; choose another directory"
    return
  fi
  room=$(df -Pk -- "$folder" | awk 'NR == 2 { printf "%d", $4 * 1024 / 1e9 }')
  [ "$room" -ge $slice_gb ] || lack "--slice $slice: $room GB free, expected $slice_gb; choose another directory"
}

# All that is needed, so that what is missing shows before anything is built.
need_all() {
  local generator compiler
  need_gpu
  compiler=${CUDACXX:-nvcc}
  need "${compiler%% *}" "$(of_cuda nvcc), or CUDACXX says where it is"
  [ -n "$quick" ] || need compute-sanitizer "$(of_cuda compute-sanitizer), or leave it out with --quick"
  need cmake "install CMake 3.22 or later, or pip install cmake"
  need ctest "it comes with CMake"
  generator=${CMAKE_GENERATOR:-$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' $build/CMakeCache.txt 2> /dev/null || true)}
  case $generator in
    Ninja*) need ninja "install it, or pip install ninja" ;;
    *) need make "install it, or set CMAKE_GENERATOR=Ninja" ;;
  esac
  compiler=${CXX:-$(command -v c++ g++ clang++ | head -1 || true)}
  compiler=${compiler:-c++}
  need "${compiler%% *}" "install a C++20 compiler such as g++, or CXX says where it is"
  need_python
  need_slice
  [ -z "$lacking" ]
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

make_slice() {  # exec, so that the name of its unfinished files has the number of this process
  PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} exec "$python" scripts/make_fuel.py "$slice" --preset flash-slice
}
# Waits until the slice is made, if it is being made.
slice_made() {
  [ -n "$making" ] || return 0
  local code=0
  wait "$making" || code=$?
  [ $code -eq 0 ] || { echo "the slice was not made:"; cat $results/make_slice.log; rm -rf -- "$partial-$making"; }
  making=''
  return $code
}

# One step of the slice, timed: name of the results, arguments
bench_step() {
  local name=$1
  shift
  ROCKET_BENCH_OUT=$results/$name.jsonl $build/bench_gpu_step "$slice" "$@" | tee $results/$name.log
}

rm -rf $results
mkdir -p $results
trap 'finish 129' HUP
trap 'finish 130' INT
trap 'finish 131' QUIT
trap 'finish 141' PIPE
trap 'finish 143' TERM
trap 'finish $?' EXIT
if [ -n "$quick" ] && [ -n "$slice" ]; then
  echo "--slice is left aside: quick runs measure nothing"
  slice=''
fi
run need_all || exit 1
if [ -n "$slice" ] && [ ! -f "$slice/config.json" ]; then
  in_background make_slice > $results/make_slice.log 2>&1
  making=$!
fi

phase "build"
run cmake -S . -B $build -DROCKET_CUDA=ON -DPython_EXECUTABLE="$python" > $results/configure.log
targets='gpu_tests _core'
[ -n "$quick" ] || targets="$targets bench_gpu_step bench_gpu_${benches// / bench_gpu_}"
run cmake --build $build -j "$cpus" --target $targets > $results/build.log 2>&1 ||
  { grep -E "error|\*\*\*|FAILED" $results/build.log | head -20; exit 1; }

phase "component tests"
run component_tests || status=1
grep -E "FAIL|SKIP|tests passed|Failed|\*\*\*" $results/ctest.log | grep -v "^ok" | head -60 || true

# Kernels that wait for the host keep others from the GPU meanwhile, and are kept from it themselves: these run alone.
phase "GPU tests, those that wait for the host"
waiting='tests/test_gpu_expert_disk.py tests/test_gpu_boosters.py'
run python_tests waiting $waiting || status=1
tail -16 $results/waiting.log

# Nothing here is timed, so all of it runs at once.
phase "GPU tests${quick:+, without compute-sanitizer}"
parallel=''
run "$python" -c 'import xdist' 2> /dev/null && parallel='-n 8 --dist loadgroup -p no:benchmark'  # benchmarks warn beside pytest-xdist
in_background python_tests pytest ${waiting//tests/--ignore tests} $parallel
pythons=$!
sanitizing=''
if [ -z "$quick" ]; then
  in_background sanitizers
  sanitizing=$!
fi
wait $pythons || status=1
tail -30 $results/pytest.log
if [ -n "$sanitizing" ]; then
  phase "compute-sanitizer, after the GPU tests beside it"
  wait $sanitizing || status=1
  cat $results/sanitizers.log
  find $results -name '*check-test_gpu_*.log' | wc -l | sed 's/$/ runs of compute-sanitizer/'
fi

if [ -z "$quick" ]; then
  phase "benchmarks of the ops"
  for name in $benches; do
    ROCKET_BENCH_OUT=$results/ops.jsonl run $build/bench_gpu_$name > $results/bench_gpu_$name.log || status=1
  done
  grep -hE "1 row |rows 1,|rows 1 |read rate|NOT COLD|cudaMemcpy|fetch|waves" $results/bench_gpu_*.log || true

  phase "decode"
  run rocket bench decode --backend cuda --fuel sparkler --json > $results/decode-sparkler.json || status=1
  if [ -n "$slice" ] && ! slice_made; then
    status=1
  elif [ -n "$slice" ]; then
    for streams in 1 8; do
      run rocket bench decode --backend cuda --fuel "$slice" --prompt 512 --chunk 512 --streams $streams --json \
        > $results/decode-slice-$streams.json || status=1
    done
    run bench_step step-slice 512 40 8 || status=1
    # Half of its experts in slots, the others in a bank of pinned memory.
    run bench_step step-slice-half 64 40 1 720 || status=1
  fi
fi
slice_made || status=1
trap '' $signals  # from here on nothing may keep it from its end
exit $status
