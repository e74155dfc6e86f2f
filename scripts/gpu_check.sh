#!/usr/bin/env bash
# Builds with CUDA and runs the component tests, the GPU tests and the benchmarks, on a machine with an NVIDIA GPU.
# Results go to build-gpu/results (JSON). Usage: scripts/gpu_check.sh [python]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-python3}
results=build-gpu/results
command -v nvidia-smi >/dev/null || { echo "no NVIDIA driver here: nvidia-smi is missing" >&2; exit 1; }
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
cmake -S . -B build-gpu -DROCKET_CUDA=ON -DPython_EXECUTABLE="$(command -v "$python")"
cmake --build build-gpu -j "$(nproc)"
mkdir -p $results
ctest --test-dir build-gpu --output-on-failure
status=0
PYTHONPATH=build-gpu/python "$python" -m pytest -q -m gpu || status=$?
[ $status -eq 0 ] || [ $status -eq 5 ] || exit $status  # 5: there are no GPU tests
PYTHONPATH=build-gpu/python "$python" -c "from rocket.cli import main; main()" bench decode --json > $results/decode.json
cat $results/decode.json
