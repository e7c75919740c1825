#!/usr/bin/env bash
# Tests and benchmarks that need a GPU. Each step writes its log to OUT (default: build/on_gpu). TEST_TIMEOUT limits each
# test to that many seconds (needs pytest-timeout).
#
#   tools/on_gpu.sh suite        the test suite with the thorough cases
#   tools/on_gpu.sh slow         the slow tests, such as tensors of more than 2^31 elements
#   tools/on_gpu.sh sanitizer    compute-sanitizer's memcheck and racecheck on the small kernel tests
#   tools/on_gpu.sh benchmarks   operations against their peers: operations.json, launching.json, scaling.json in OUT
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-build/on_gpu}
mkdir -p "$out"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
pytest=(python3 -m pytest -q -p no:cacheprovider --tb=short ${TEST_TIMEOUT:+--timeout "$TEST_TIMEOUT"})

case ${1:-} in
  suite) "${pytest[@]}" --numprocesses "${WORKERS:-8}" tests "${@:2}" |& tee "$out/suite.log" | tail -40 ;;
  slow) "${pytest[@]}" --run-slow -m slow tests "${@:2}" |& tee "$out/slow.log" | tail -40 ;;
  sanitizer)
    # Without torch's caching allocator every tensor is a separate allocation, so an access beyond its end is detected.
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    for tool in memcheck racecheck; do
      compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 9 --launch-timeout 600 \
        "${pytest[@]}" tests/kernels/test_properties.py tests/kernels/loss \
        -k "test_outputs_and_gradients and 1- or test_products or test_sums" "${@:2}" \
        |& tee "$out/$tool.log" | tail -15
    done
    ;;
  benchmarks)
    python3 -m benchmarks.operations --out "$out/operations.json" |& tee "$out/operations.log" | tail -60
    python3 -m benchmarks.launching --out "$out/launching.json" >"$out/launching.log" 2>&1
    python3 -m benchmarks.scaling --out "$out/scaling.json" |& tee "$out/scaling.log" | tail -20
    ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
