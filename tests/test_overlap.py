"""The analysis of overlap between communication and computation."""

import pytest

from benchmarks.overlap import Kernel, length, merged, overlap, summary

KERNELS = [
    Kernel("nvjet_hsh_128x256", 0, 100),
    Kernel("ncclDevKernel_AllGather_RING_LL", 50, 150),
    Kernel("ncclDevKernel_ReduceScatter_Sum_f32", 140, 160),
    Kernel("sm90_xmma_gemm_bf16", 200, 260),
    Kernel("cudnn_generated_fort_native_sdpa_sm90", 150, 155),
    Kernel("_rms_norm_kernel", 255, 270),
]


def test_summary() -> None:
    expected = {"step": 0.27, "exposed communication": 0.055, "idle": 0.04, "GEMM during communication": 0.05}
    found = summary(KERNELS)
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    times = {kind: value["ms"] for kind, value in found["by kind"].items()}
    assert times == pytest.approx(
        {"all-gather": 0.1, "reduce-scatter": 0.02, "attention": 0.005, "GEMM": 0.16, "other": 0.015}
    )
    assert summary([]) == {}


def test_spans() -> None:
    spans = merged(KERNELS)
    assert spans == [(0, 160), (200, 270)]
    assert length(spans) == 230
    assert overlap(spans, [(150, 210), (260, 300)]) == 30
