"""The catalogue of device types: plausible, complete enough, and found by the names that people and drivers use."""

from __future__ import annotations

import pytest

from hetpipe.values.catalogue import CATALOGUE, type_of_device_name

GIB = 1 << 30


def test_what_people_own_is_there() -> None:
    assert len(CATALOGUE) >= 40
    assert {"TITAN_V", "TITAN_RTX", "RTX_2060", "QUADRO_P4000"} <= set(CATALOGUE), "the paper's four"
    assert {"GTX_1080_TI", "RTX_2080_TI", "RTX_3090", "RTX_4090", "RTX_5090", "RTX_A6000"} <= set(CATALOGUE)
    assert {"T4", "L4", "V100_16GB", "V100_32GB", "A10", "A100_40GB", "A100_80GB", "H200", "B200"} <= set(CATALOGUE)
    assert {"MI100", "MI210", "MI250X", "MI300X", "RX_6900_XT", "RX_7900_XTX"} <= set(CATALOGUE)


def test_memory_orders_the_papers_four_as_the_paper_says() -> None:
    memory = {name: CATALOGUE[name].memory_bytes for name in ("TITAN_RTX", "TITAN_V", "QUADRO_P4000", "RTX_2060")}
    assert list(memory.values()) == [24 * GIB, 12 * GIB, 8 * GIB, 6 * GIB]


def test_sorted_by_name() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    assert all(entry.name == name for name, entry in CATALOGUE.items())


def test_figures_are_plausible() -> None:
    for entry in CATALOGUE.values():
        assert entry.memory_bytes % GIB == 0, entry.name
        assert 4 * GIB <= entry.memory_bytes <= 288 * GIB, entry.name
        assert 1e12 <= entry.fp32_flops_per_second <= 2e14, entry.name
        assert 1e11 <= entry.memory_bytes_per_second <= 1e13, entry.name
        assert 5e9 <= entry.link.bytes_per_second <= 1e12, entry.name
        assert entry.link.bytes_per_second < entry.memory_bytes_per_second, entry.name
        assert len(entry.source) > 10, entry.name


def test_narrow_formats_are_no_slower() -> None:
    for entry in CATALOGUE.values():
        fp32, fp16 = entry.fp32_flops_per_second, entry.fp16_flops_per_second
        for narrow in (entry.tf32_flops_per_second, entry.bf16_flops_per_second, fp16):
            assert narrow is None or narrow >= fp32, entry.name
        assert fp16 is None or fp16 <= 32 * fp32, entry.name
        # Whoever has bf16 has fp16 at least as fast; tf32 is half of bf16 or less.
        assert entry.bf16_flops_per_second is None or (fp16 is not None and fp16 >= entry.bf16_flops_per_second), (
            entry.name
        )
        if entry.tf32_flops_per_second is not None:
            assert entry.bf16_flops_per_second is not None, entry.name
            assert entry.tf32_flops_per_second <= 0.51 * entry.bf16_flops_per_second, entry.name


@pytest.mark.parametrize(("family", "ratio"), [("RTX_20", 4), ("RTX_30", 2), ("RTX_40", 2), ("RTX_50", 2)])
def test_matrix_peaks_of_a_geforce_family_keep_its_ratio_to_fp32(family: str, ratio: int) -> None:
    """With sums in fp32, half of what data sheets print for sums in fp16, and dense (NVIDIA's white papers)."""
    for entry in (entry for name, entry in CATALOGUE.items() if name.startswith(family)):
        assert entry.fp16_flops_per_second == pytest.approx(ratio * entry.fp32_flops_per_second, rel=0.01)
        if family != "RTX_20":
            assert entry.bf16_flops_per_second == entry.fp16_flops_per_second
            assert entry.tf32_flops_per_second == entry.fp32_flops_per_second


@pytest.mark.parametrize(
    ("name", "teraflops", "gigabytes_per_second"),
    [
        ("TITAN_RTX", (16.3, None, None, 130.5), 672),
        ("V100_16GB", (15.7, None, None, 125), 900),
        ("RTX_3090", (35.6, 35.6, 71, 71), 936),
        ("A100_80GB", (19.5, 156, 312, 312), 2039),
        ("H100_80GB", (67, 494.5, 989.5, 989.5), 3350),
        ("B200", (75, 1100, 2250, 2250), 7700),
        ("MI300X", (163.4, 653.7, 1307.4, 1307.4), 5300),
    ],
)
def test_dense_figures_of_the_data_sheets(
    name: str, teraflops: tuple[float | None, ...], gigabytes_per_second: float
) -> None:
    """Data sheets print most of these with sparsity, twice as high; B200's early brief printed 80 and 8,000."""
    entry = CATALOGUE[name]
    peaks = (
        entry.fp32_flops_per_second,
        entry.tf32_flops_per_second,
        entry.bf16_flops_per_second,
        entry.fp16_flops_per_second,
    )
    assert tuple(peak and peak / 1e12 for peak in peaks) == pytest.approx(teraflops)
    assert entry.memory_bytes_per_second == pytest.approx(gigabytes_per_second * 1e9)


def test_every_name_finds_its_entry() -> None:
    for entry in CATALOGUE.values():
        for name in (entry.name, entry.name.lower(), entry.name.replace("_", " "), *entry.reported_as):
            assert type_of_device_name(name, entry.memory_bytes) == entry.name, entry.name
        assert type_of_device_name(entry.name) == entry.name, entry.name


@pytest.mark.parametrize(
    ("reported", "memory_bytes", "expected"),
    [
        ("NVIDIA GeForce RTX 3090", 25_438_126_080, "RTX_3090"),
        ("GeForce GTX 1080 Ti", None, "GTX_1080_TI"),
        ("TITAN V", None, "TITAN_V"),
        ("NVIDIA TITAN RTX", None, "TITAN_RTX"),
        ("Quadro P4000", None, "QUADRO_P4000"),
        ("Quadro RTX 6000", None, "QUADRO_RTX_6000"),
        ("NVIDIA RTX 6000 Ada Generation", None, "RTX_6000_ADA"),
        ("NVIDIA RTX A6000", None, "RTX_A6000"),
        ("Tesla T4", 15_843_721_216, "T4"),
        ("Tesla V100-SXM2-16GB", 16_945_512_448, "V100_16GB"),
        ("Tesla V100-PCIE-32GB", None, "V100_PCIE_32GB"),
        ("NVIDIA A100-SXM4-80GB", 85_051_834_368, "A100_80GB"),
        ("NVIDIA A100 80GB PCIe", None, "A100_PCIE_80GB"),
        ("NVIDIA H100 80GB HBM3", 84_943_044_608, "H100_80GB"),
        ("NVIDIA H100 PCIe", None, "H100_PCIE_80GB"),
        ("NVIDIA H200", 150_754_820_096, "H200"),
        ("AMD Instinct MI250X", None, "MI250X"),
        ("AMD Radeon RX 7900 XTX", 25_753_026_560, "RX_7900_XTX"),
        ("AMD Instinct MI60 / MI50", 34_342_961_152, "MI60"),
        ("NVIDIA GeForce RTX 3080", 12_622_168_064, "RTX_3080_12GB"),
        ("NVIDIA GeForce RTX 3080", None, "RTX_3080"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 17_179_869_184, None),
        ("NVIDIA GeForce RTX 3090", 12 * GIB, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB, None),
        ("A100", None, None),
        ("AMD Radeon Graphics", None, None),
        ("cpu", None, None),
        ("", None, None),
    ],
)
def test_names_that_drivers_report(reported: str, memory_bytes: int | None, expected: str | None) -> None:
    assert type_of_device_name(reported, memory_bytes) == expected
