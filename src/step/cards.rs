//! The built-in device profiles.
//!
//! Peaks are the vendor's dense peaks (without sparsity) per GPU. The source of each value is next to it.
//!
//! The memory of a profile is the total that the driver reports to a program, which is less than the size on the
//! datasheet. Some of these totals are known from error messages of PyTorch (*GPU 0 has a total capacity of 79.11 GiB*).
//! The others are the totals of `nvidia-smi` less 640 MiB. That is the largest difference between the two that is known:
//! an RTX PRO 6000 has 97,887 MiB by `nvidia-smi` and 97,247 MiB by CUDA (llama.cpp, pull request 23604).

use super::device::DeviceProfile;

const MIB: u64 = 1 << 20;

/// Bytes of the CUDA context for each multiprocessor. An H200 (132 multiprocessors, driver 580.159.04) had a context of
/// 554,500,096 bytes in a training step of GPT-2 (`benches/gpu/2026-11-26-h200.json`). The context grows with the number
/// of multiprocessors: an RTX PRO 6000 with 188 has 555 MiB, and an RTX 4060 Ti with 34 has 107 MiB (llama.cpp, pull
/// request 23604), which is less for each than on the H200.
const CONTEXT_BYTES: u64 = 554_500_096 / 132;

/// Bytes of all kernels of a step. Steps on an H200 had 4 to 6 MB. In the same steps cuBLASLt and CUDA graphs took
/// nothing, because cuBLASLt's workspace is a part of the arena.
const KERNEL_BYTES: u64 = 6 * MIB;

/// Bytes of NCCL's buffers for each channel to another rank: 10 MiB to receive and 2 MiB to send. Eight H100s had 32
/// channels for each pair (NVIDIA/nccl, issue 1685).
const CHANNEL_BYTES: u64 = 12 * MIB;
const MAX_CHANNELS: f64 = 32.0;

/// Returns the bytes that the CUDA context takes on a GPU with this many multiprocessors, rounded up to whole MiB.
fn context(multiprocessors: u64) -> u64 {
    (multiprocessors * CONTEXT_BYTES).next_multiple_of(MIB)
}

/// Returns the bytes of NCCL's buffers for each rank with which a rank exchanges data. The number of channels is assumed
/// to grow with the bandwidth of the link, up to the number on an H100.
fn neighbor(link: f64) -> u64 {
    (MAX_CHANNELS * link / NVLINK_4).ceil().clamp(1.0, MAX_CHANNELS) as u64 * CHANNEL_BYTES
}

/// Returns the total that CUDA is assumed to report for a total of `nvidia-smi`, in MiB.
fn below(nvidia_smi: u64) -> u64 {
    (nvidia_smi - 640) * MIB
}

/// Returns a number of GiB in bytes.
fn gib(gib: f64) -> u64 {
    (gib * (1u64 << 30) as f64) as u64
}

/// Returns all built-in profiles, in the order of the sizes on their datasheets.
pub(super) fn all() -> [DeviceProfile; 13] {
    [t4(), v100_16(), a10(), l4(), rtx3090(), rtx4090(), a100_40(), a6000(), l40s(), a100_80(), h100(), h200(), b200()]
        .map(|profile| DeviceProfile { neighbor: neighbor(profile.link), ..profile })
}

/// Values that are assumed for every GPU whose profile has no other value. An operation replayed from a CUDA graph
/// takes at least 2 µs. Large products reach three quarters of the tensor cores' peak. GPUs without NVLink exchange
/// messages over PCIe 4.0 with 16 lanes (32 GB/s in each direction). Eight GPUs of a node share a network of 200 Gb/s. A message begins to arrive after 10 µs, and reaches
/// 80 % of the link's bandwidth. Computation hides half of the gradient reduction. Each rank has a disk of its own, whose
/// link has 4 lanes of PCIe 4.0 (8 GB/s in each direction).
pub(super) fn assumed() -> DeviceProfile {
    DeviceProfile {
        name: String::new(),
        memory: 0,
        context: 0,
        kernels: KERNEL_BYTES,
        neighbor: 0,
        reserve: 0,
        capability: 8.0,
        f32_flops: 0.0,
        bf16_flops: 0.0,
        products: 0.75,
        attention: 0.6,
        bytes: 0.0,
        launch: 2e-6,
        link: PCIE_4,
        node: 8,
        network: ETHERNET_200 / 8.0,
        latency: 10e-6,
        overlap: 0.5,
        host: PCIE_4,
        disk: PCIE_4 / 4.0,
    }
}

/// Bytes per second that copies reach in one direction of PCIe 4.0 with 16 lanes: 80 % of 32 GB/s. Each generation has
/// twice the bandwidth of the one before it (PCI Express Base Specification, revisions 3.0 to 5.0).
const PCIE_4: f64 = 0.8 * 32e9;

/// Bytes per second that messages between nodes reach over a network of 200 Gb/s: 80 %.
const ETHERNET_200: f64 = 0.8 * 25e9;

/// Bytes per second that messages reach in one direction of the NVLinks of an H100: 80 % of 450 GB/s.
const NVLINK_4: f64 = 0.8 * 450e9;

/// NVIDIA T4 datasheet (2019): 8.1 TFLOP/s in f32, 320 GB/s, PCIe 3.0 (16 GB/s in each direction). It has no bf16, so
/// the rate of f32 is assumed. 15,360 MiB by `nvidia-smi`. 40 multiprocessors.
fn t4() -> DeviceProfile {
    DeviceProfile {
        name: "t4".to_owned(),
        memory: below(15_360),
        context: context(40),
        capability: 7.5,
        f32_flops: 8.1e12,
        bf16_flops: 8.1e12,
        bytes: 0.9 * 320e9,
        link: PCIE_4 / 2.0,
        host: PCIE_4 / 2.0,
        ..assumed()
    }
}

/// NVIDIA V100 datasheet (2020), 16 GB SXM2: 15.7 TFLOP/s in f32, 900 GB/s, NVLink 300 GB/s as the sum of both
/// directions, PCIe 3.0. It has no bf16, so the rate of f32 is assumed. 16,160 MiB by `nvidia-smi`. 80 multiprocessors. A
/// DGX-1 has four networks of 100 Gb/s for eight GPUs.
fn v100_16() -> DeviceProfile {
    DeviceProfile {
        name: "v100-16".to_owned(),
        memory: below(16_160),
        context: context(80),
        capability: 7.0,
        f32_flops: 15.7e12,
        bf16_flops: 15.7e12,
        bytes: 0.9 * 900e9,
        link: 0.8 * 150e9,
        network: ETHERNET_200 / 4.0,
        host: PCIE_4 / 2.0,
        ..assumed()
    }
}

/// NVIDIA A10 datasheet (2021): 125 TFLOP/s in bf16, 31.2 in f32, 600 GB/s. 23,028 MiB by `nvidia-smi`. 72
/// multiprocessors.
fn a10() -> DeviceProfile {
    DeviceProfile {
        name: "a10".to_owned(),
        memory: below(23_028),
        context: context(72),
        capability: 8.6,
        f32_flops: 31.2e12,
        bf16_flops: 125e12,
        bytes: 0.9 * 600e9,
        ..assumed()
    }
}

/// NVIDIA L4 datasheet (2023): 121 TFLOP/s in bf16, 30.3 in f32, 300 GB/s. 23,034 MiB by `nvidia-smi`. 58
/// multiprocessors.
fn l4() -> DeviceProfile {
    DeviceProfile {
        name: "l4".to_owned(),
        memory: below(23_034),
        context: context(58),
        capability: 8.9,
        f32_flops: 30.3e12,
        bf16_flops: 121e12,
        bytes: 0.9 * 300e9,
        ..assumed()
    }
}

/// NVIDIA Ampere GA102 whitepaper (2020), GeForce RTX 3090: 71 TFLOP/s in bf16 with f32 sums, 35.6 in f32, 936 GB/s.
/// PyTorch reports 23.68 GiB. 82 multiprocessors.
fn rtx3090() -> DeviceProfile {
    DeviceProfile {
        name: "rtx3090".to_owned(),
        memory: gib(23.68),
        context: context(82),
        capability: 8.6,
        f32_flops: 35.6e12,
        bf16_flops: 71e12,
        bytes: 0.9 * 936e9,
        ..assumed()
    }
}

/// NVIDIA Ada whitepaper (2022), GeForce RTX 4090: 165.2 TFLOP/s in bf16 with f32 sums, 82.6 in f32, 1,008 GB/s. PyTorch
/// reports 23.61 to 23.65 GiB. 128 multiprocessors.
fn rtx4090() -> DeviceProfile {
    DeviceProfile {
        name: "rtx4090".to_owned(),
        memory: gib(23.61),
        context: context(128),
        capability: 8.9,
        f32_flops: 82.6e12,
        bf16_flops: 165.2e12,
        bytes: 0.9 * 1.008e12,
        ..assumed()
    }
}

/// NVIDIA A100 Tensor Core GPU datasheet (2021), 40 GB SXM: like the A100 with 80 GB, but 1,555 GB/s. PyTorch reports
/// 39.50 GiB.
fn a100_40() -> DeviceProfile {
    DeviceProfile { name: "a100-40".to_owned(), memory: gib(39.50), bytes: 0.9 * 1.555e12, ..a100_80() }
}

/// NVIDIA RTX A6000 datasheet (2021): 154.8 TFLOP/s in bf16, 38.7 in f32, 768 GB/s. 49,140 MiB by `nvidia-smi`. 84
/// multiprocessors.
fn a6000() -> DeviceProfile {
    DeviceProfile {
        name: "a6000".to_owned(),
        memory: below(49_140),
        context: context(84),
        capability: 8.6,
        f32_flops: 38.7e12,
        bf16_flops: 154.8e12,
        bytes: 0.9 * 768e9,
        ..assumed()
    }
}

/// NVIDIA L40S datasheet (2023): 362 TFLOP/s in bf16, 91.6 in f32, 864 GB/s. PyTorch reports 44.42 GiB. 142
/// multiprocessors.
fn l40s() -> DeviceProfile {
    DeviceProfile {
        name: "l40s".to_owned(),
        memory: gib(44.42),
        context: context(142),
        capability: 8.9,
        f32_flops: 91.6e12,
        bf16_flops: 362e12,
        bytes: 0.9 * 864e9,
        ..assumed()
    }
}

/// NVIDIA A100 Tensor Core GPU datasheet (2021), 80 GB SXM: 312 TFLOP/s in bf16, 19.5 in f32, 2,039 GB/s, NVLink 600
/// GB/s as the sum of both directions. Large products reach four fifths of the tensor cores' peak; FlashAttention-2
/// (arXiv 2307.08691, figures 5 and 6) reaches up to 73 % in the forward and 63 % in the backward. PyTorch reports 79.14
/// to 79.25 GiB. 108 multiprocessors. A DGX A100 has a network of 200 Gb/s for each GPU.
fn a100_80() -> DeviceProfile {
    DeviceProfile {
        name: "a100-80".to_owned(),
        memory: gib(79.14),
        context: context(108),
        f32_flops: 19.5e12,
        bf16_flops: 312e12,
        products: 0.8,
        bytes: 0.9 * 2.039e12,
        link: 0.8 * 300e9,
        network: ETHERNET_200,
        ..assumed()
    }
}

/// NVIDIA H100 Tensor Core GPU datasheet (2023), SXM: 989.4 TFLOP/s in bf16, 67 in f32, 3.35 TB/s, NVLink 900 GB/s as
/// the sum of both directions, PCIe 5.0. A large product reaches 770 TFLOP/s and a copy 3.0 TB/s; FlashAttention-3 (arXiv
/// 2407.08608, figures 5 and 6) reaches up to 75 % in the forward, less in the backward. PyTorch reports 79.11 GiB. 132
/// multiprocessors. A DGX H100 has a network of 400 Gb/s for each GPU; so has a DGX B200.
fn h100() -> DeviceProfile {
    DeviceProfile {
        name: "h100".to_owned(),
        memory: gib(79.11),
        context: context(132),
        capability: 9.0,
        f32_flops: 67e12,
        bf16_flops: 989.4e12,
        products: 770.0 / 989.4,
        bytes: 3.0e12,
        link: NVLINK_4,
        network: 2.0 * ETHERNET_200,
        host: 2.0 * PCIE_4,
        ..assumed()
    }
}

/// NVIDIA H200 Tensor Core GPU datasheet (2024), SXM: like an H100, but with 141 GB of memory at 4.8 TB/s. 143,771 MiB
/// by `nvidia-smi`.
fn h200() -> DeviceProfile {
    DeviceProfile { name: "h200".to_owned(), memory: below(143_771), bytes: 0.9 * 4.8e12, ..h100() }
}

/// NVIDIA HGX B200 datasheet (2025), an eighth of the board: 2.25 PFLOP/s in bf16, 75 TFLOP/s in f32, 180 GB of memory
/// at 7.7 TB/s, NVLink 1.8 TB/s as the sum of both directions, PCIe 5.0. The assumed fractions are those for every GPU.
/// The total that the driver reports is not known, so the 180 GB of the datasheet are assumed. 148 multiprocessors.
fn b200() -> DeviceProfile {
    DeviceProfile {
        name: "b200".to_owned(),
        memory: 180_000_000_000,
        context: context(148),
        capability: 10.0,
        f32_flops: 75e12,
        bf16_flops: 2250e12,
        bytes: 0.9 * 7.7e12,
        link: 0.8 * 900e9,
        network: 2.0 * ETHERNET_200,
        host: 2.0 * PCIE_4,
        ..assumed()
    }
}

#[cfg(test)]
mod tests {
    use gapless_parallel::Mesh;

    use super::*;
    use crate::step::Precision;

    /// The overheads of an H200 are at least what was measured on one, and every profile leaves room for an arena.
    #[test]
    fn the_overheads_cover_what_was_measured() {
        let profiles = all();
        let h200 = profiles.iter().find(|profile| profile.name == "h200").unwrap();
        assert!((554_500_096..554_500_096 + MIB).contains(&h200.context), "{}", h200.context);
        assert!(h200.kernels >= 4_194_304);
        assert_eq!(h200.neighbor, 384 * MIB);
        for profile in &profiles {
            let alone = profile.memory - profile.overheads(Mesh::default()).bytes();
            assert!(alone > profile.memory / 10 * 9, "{}", profile.name);
        }
    }

    /// The table of profiles in the documentation has the values of the profiles.
    #[test]
    fn the_documentation_has_these_values() {
        let documented = include_str!("../../docs/sweep.md");
        for profile in all() {
            let DeviceProfile { name, memory, context, kernels, neighbor, bytes, link, network, host, .. } = &profile;
            let gb = |rate: f64| format!("{:.3}", rate / 1e9).trim_end_matches('0').trim_end_matches('.').to_owned();
            let row = format!(
                "| {:.2} | {} | {} | {:.1} | {:.1} | {} | {} | {} | {} |",
                *memory as f64 / (1u64 << 30) as f64,
                (context + kernels) >> 20,
                neighbor >> 20,
                profile.rates(Precision::Bf16).flops / 1e12,
                profile.rates(Precision::F32).flops / 1e12,
                gb(*bytes),
                gb(*link),
                gb(*network),
                gb(*host),
            );
            let line = documented.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
            assert!(line.is_some_and(|line| line.ends_with(&row)), "docs/sweep.md, {name}: expected {row}");
        }
    }
}
