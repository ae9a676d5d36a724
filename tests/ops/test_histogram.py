"""The native histogram of latencies, against sorted durations."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.places import ROOT

HEADER = ROOT / "engine" / "ops" / "native" / "histogram.h"
SOURCE = f"""
#include "{HEADER}"
#include <thread>
using namespace tierbed;
extern "C" void measure(const std::uint64_t* durations, std::size_t n, const double* shares, std::size_t m,
                        double* out) {{
    Histogram histogram;
    std::thread other([&] {{ for (std::size_t i = 0; i < n; i += 2) histogram.add(durations[i]); }});
    for (std::size_t i = 1; i < n; i += 2) histogram.add(durations[i]);
    other.join();
    for (std::size_t i = 0; i < m; ++i) out[i] = histogram.quantile(shares[i]);
    out[m] = histogram.max();
    out[m + 1] = static_cast<double>(histogram.count());
}}
extern "C" double timed() {{
    Histogram histogram;
    {{
        const Timer timer(histogram);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }}
    return histogram.count() == 1 ? histogram.max() : -1;
}}
"""
SHARES = np.array([0.0, 0.01, 0.5, 0.9, 0.99, 1.0])

Measure = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("histogram")
    (folder / "histogram.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, "-o", "histogram.so", "histogram.cpp"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "histogram.so"))


@pytest.fixture(scope="module")
def measure(library: ctypes.CDLL) -> Measure:
    def run(durations: list[int]) -> np.ndarray:
        given, out = np.array(durations, np.uint64), np.empty(len(SHARES) + 2)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (given, SHARES, out)]
        sizes = [ctypes.c_size_t(len(given)), ctypes.c_size_t(len(SHARES))]
        library.measure(pointers[0], sizes[0], pointers[1], sizes[1], pointers[2])
        return out

    return run


durations = st.integers(0, 20) | st.integers(0, 10**6) | st.integers(0, 2**40 - 1)


@given(st.lists(durations, min_size=1, max_size=200))
def test_quantiles_are_within_a_bucket_of_the_true_ones(measure: Measure, durations: list[int]) -> None:
    out = measure(durations)
    ordered = np.sort(durations)
    ranks = np.maximum(np.ceil(SHARES * len(ordered)).astype(int) - 1, 0)
    true = ordered[ranks] * 1e-9
    assert (np.abs(out[: len(SHARES)] - true) <= true * 0.0625 + 1e-18).all()
    assert out[len(SHARES)] == pytest.approx(ordered[-1] * 1e-9)
    assert out[len(SHARES) + 1] == len(durations)
    assert (np.diff(out[: len(SHARES) + 1]) >= 0).all()


def test_nothing_measured_is_zero_the_longest_is_exact_and_a_timer_adds_its_scope(
    measure: Measure, library: ctypes.CDLL
) -> None:
    assert not measure([]).any()
    out = measure([1, 2**63])
    assert out[len(SHARES)] == pytest.approx(2**63 * 1e-9)
    assert out[-3] == out[-2]
    library.timed.restype = ctypes.c_double
    assert 0.02 <= library.timed() < 10
