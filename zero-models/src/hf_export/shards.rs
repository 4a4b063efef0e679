//! Distribution of tensors among files.

use crate::{ModelConfig, ModelError, ModelParam, Result};

use super::ExportDtype;

/// A tensor of the checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Tensor<'a> {
    pub(super) name: &'a str,
    pub(super) param: &'a ModelParam,
    pub(super) bytes: u64,
}

/// Returns every tensor, in the order of the parameters.
pub(super) fn tensors<'a>(config: &ModelConfig, parameters: &'a [ModelParam], dtype: ExportDtype) -> Vec<Tensor<'a>> {
    let mut tensors = Vec::with_capacity(parameters.len());
    for param in parameters {
        let bytes = (param.numel() * dtype.element().size()) as u64;
        let names = [Some(param.name.as_str()), config.repeated_as(param)];
        tensors.extend(names.into_iter().flatten().map(|name| Tensor { name, param, bytes }));
    }
    tensors
}

/// Returns the tensors of each file. Files are filled in order; a new one begins if the next tensor would exceed `most` bytes.
pub(super) fn split<'a>(tensors: &[Tensor<'a>], most: u64) -> Vec<Vec<Tensor<'a>>> {
    let mut files: Vec<Vec<Tensor<'a>>> = Vec::new();
    let mut room = 0;
    for tensor in tensors {
        match files.last_mut() {
            Some(file) if tensor.bytes <= room => {
                file.push(tensor.clone());
                room -= tensor.bytes;
            }
            _ => {
                files.push(vec![tensor.clone()]);
                room = most.saturating_sub(tensor.bytes);
            }
        }
    }
    files
}

/// Returns the name that transformers gives file `index` of `count`.
pub(super) fn shard_name(single: &str, index: usize, count: usize) -> String {
    match count {
        1 => single.to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Parses a size in the format of transformers' `max_shard_size` to bytes: `5GB` is 5 * 10^9, `512MiB` is 512 * 2^20, a plain number is
/// bytes.
///
/// # Errors
/// [`ModelError::ExportSetting`] for any other text, and for less than one byte.
pub fn parse_bytes(text: &str) -> Result<u64> {
    const UNITS: [(&str, u64); 9] = [
        ("kb", 1000),
        ("mb", 1000u64.pow(2)),
        ("gb", 1000u64.pow(3)),
        ("tb", 1000u64.pow(4)),
        ("kib", 1 << 10),
        ("mib", 1 << 20),
        ("gib", 1 << 30),
        ("tib", 1 << 40),
        ("b", 1),
    ];
    let lower = text.trim().to_ascii_lowercase();
    let split = UNITS.into_iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, factor as f64)));
    let (number, factor) = split.unwrap_or((&lower, 1.0));
    match number.trim().parse::<f64>() {
        Ok(number) if number.is_finite() && number * factor >= 1.0 => Ok((number * factor) as u64),
        _ => Err(ModelError::ExportSetting {
            setting: "size",
            got: text.to_string(),
            expected: "a number with one of the units KB, MB, GB, TB, KiB, MiB, GiB and TiB, such as 6GiB, or a number of bytes",
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_filled_in_order() {
        let param = ModelParam { path: String::new(), shape: vec![1], name: "p".to_string(), transposed: false };
        let sizes = |most: u64, bytes: &[u64]| -> Vec<Vec<u64>> {
            let tensors: Vec<_> = bytes.iter().map(|&bytes| Tensor { name: "p", param: &param, bytes }).collect();
            split(&tensors, most).iter().map(|file| file.iter().map(|tensor| tensor.bytes).collect()).collect()
        };
        assert_eq!(sizes(10, &[4, 6, 1, 30, 2, 8]), [vec![4, 6], vec![1], vec![30], vec![2, 8]]);
        assert_eq!(sizes(10, &[11, 11]), [[11], [11]]);
        assert_eq!(sizes(100, &[4, 6]), [[4, 6]]);
        assert_eq!(shard_name("model.safetensors", 0, 1), "model.safetensors");
        assert_eq!(shard_name("model.safetensors", 1, 12), "model-00002-of-00012.safetensors");
    }

    #[test]
    fn sizes_are_read_as_transformers_reads_them() {
        for (text, bytes) in [
            ("5GB", 5_000_000_000),
            ("1.5 gb", 1_500_000_000),
            ("512MiB", 512 << 20),
            ("1KB", 1000),
            ("2TiB", 2 << 40),
            ("300", 300),
            ("300B", 300),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "GB", "0", "-1GB", "5PB", "infGB", "nan"] {
            let error = parse_bytes(text).unwrap_err().to_string();
            assert!(error.contains("such as 6GiB"), "{error}");
        }
    }
}
