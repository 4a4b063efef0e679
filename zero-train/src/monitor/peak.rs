//! Peak floating-point rates of GPUs, for model FLOPs utilization (MFU).

/// Part of a GPU's name, and its dense floating-point operations per second in 10^12, from NVIDIA's data sheets: on tensor
/// cores in 16 bit, and in fp32 (as TF32 if the GPU has it). The first match counts.
const PEAKS: [(&str, f64, f64); 11] = [
    ("B200", 2250.0, 1125.0),
    ("H200", 989.4, 494.7),
    ("H100 PCIe", 756.0, 378.0),
    ("H100 NVL", 835.0, 417.5),
    ("H100", 989.4, 494.7),
    ("A100", 312.0, 156.0),
    ("L40S", 362.0, 183.0),
    ("L4", 121.0, 60.0),
    ("V100", 125.0, 15.7),
    ("T4", 65.0, 8.1),
    ("RTX 4090", 165.2, 82.6),
];

/// Returns the floating-point operations per second of the GPU with this name, in 16 bit (`half`) or in fp32; `None` if it is unknown.
pub fn peak_flops(name: &str, half: bool) -> Option<f64> {
    let whole = |found: usize, part: &str| {
        // An L40 is no L4.
        let next = name[found + part.len()..].chars().next();
        !next.is_some_and(|next| next.is_ascii_alphanumeric())
    };
    let peak = PEAKS.iter().find(|(part, ..)| name.find(part).is_some_and(|found| whole(found, part)))?;
    Some(if half { peak.1 } else { peak.2 } * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_known_by_the_name_that_its_driver_gives() {
        for (name, half, teraflops) in [
            ("NVIDIA H100 80GB HBM3", true, 989.4),
            ("NVIDIA H100 PCIe", true, 756.0),
            ("NVIDIA H200", false, 494.7),
            ("NVIDIA A100-SXM4-80GB", true, 312.0),
            ("NVIDIA L40S", true, 362.0),
            ("NVIDIA L4", false, 60.0),
            ("Tesla V100-SXM2-16GB", true, 125.0),
        ] {
            assert_eq!(peak_flops(name, half), Some(teraflops * 1e12), "{name}");
        }
        for unknown in ["NVIDIA L40", "NVIDIA GeForce GTX 1080", "llvmpipe", ""] {
            assert_eq!(peak_flops(unknown, true), None, "{unknown}");
        }
    }
}
