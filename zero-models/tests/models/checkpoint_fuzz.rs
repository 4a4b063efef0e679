//! cargo test -p zero-models --test models checkpoint_fuzz
//!
//! Damaged or crafted Hugging Face checkpoints: each is opened and its tensors are converted, or it is refused with an error that names
//! its file. None makes the reader panic.

use crate::mutate;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use mutate::{Random, mutate, mutate_file, on};
use safetensors::tensor::{Dtype, TensorView, serialize};
use zero_models::ModelError;
use zero_models::safetensors_file::Checkpoint;

/// Number of mutated inputs of each kind.
const FILES: usize = 30_000;
const INDICES: usize = 10_000;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A valid file: every type that can be converted, one that cannot, a scalar and an empty tensor.
fn file(suffix: &str) -> Vec<u8> {
    let types = [Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::I32];
    let data = vec![0x3c; 1 << 10];
    let views = types.iter().flat_map(|&dtype| {
        [vec![3, 5], vec![], vec![2, 0]].map(|shape| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let name = format!("h.{shape:?}.{dtype:?}{suffix}");
            (name, TensorView::new(dtype, shape, &data[..bytes]).unwrap())
        })
    });
    let texts = Some([("format".to_string(), "pt".to_string())].into());
    serialize(views.collect::<Vec<_>>(), texts).unwrap()
}

/// Opens the folder and converts every tensor.
fn read(dir: &Path) -> Result<usize, ModelError> {
    let checkpoint = Checkpoint::open(dir)?;
    let mut elements = 0;
    for name in checkpoint.names() {
        let tensor = checkpoint.get(name).expect("a name of the checkpoint");
        if tensor.check_dtype().is_ok() {
            let values = tensor.to_f32()?;
            assert_eq!(values.len(), tensor.shape.iter().product::<usize>());
            elements += values.len();
        }
    }
    Ok(elements)
}

#[derive(Default)]
struct Tally(BTreeMap<String, usize>);

impl Tally {
    fn add(&mut self, result: &Result<usize, ModelError>) {
        let outcome = match result {
            Ok(_) => "accepted".to_string(),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains(FILE) || text.contains("model-0000"), "no file in: {text}");
                format!("{error:?}").split([' ', '{', '(']).next().unwrap_or_default().to_string()
            }
        };
        *self.0.entry(outcome).or_default() += 1;
    }

    /// Prints without a macro, as the test harness captures the output of macros.
    fn print(&self, what: &str) {
        let cases: usize = self.0.values().sum();
        writeln!(std::io::stderr().lock(), "{cases} {what}: {:?}", self.0).unwrap();
    }
}

/// Returns a file of this header followed by `data`.
fn with_header(json: &[u8], data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json, data].concat()
}

#[test]
fn mutated_files() {
    let (sound, mut random, mut tally) = (file(""), Random(1), Tally::default());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE);
    fs::write(&path, &sound).unwrap();
    assert_eq!(read(dir.path()).unwrap(), 4 * 16);
    for case in 0..FILES {
        let mut bytes = sound.clone();
        mutate_file(&mut random, &mut bytes);
        // A new file each time: the former may still be mapped.
        fs::remove_file(&path).unwrap();
        fs::write(&path, &bytes).unwrap();
        tally.add(&on("a file", case, &bytes, || read(dir.path())));
    }
    tally.print("mutated files");
}

#[test]
fn mutated_indices_and_shards() {
    let (mut random, mut tally) = (Random(2), Tally::default());
    let dir = tempfile::tempdir().unwrap();
    let names = ["model-00000.safetensors", "model-00001.safetensors"];
    let shards = [file(""), file("x")];
    let mut map = serde_json::Map::new();
    for (name, shard) in names.iter().zip(&shards) {
        let parsed = safetensors::SafeTensors::deserialize(shard).unwrap();
        map.extend(parsed.names().into_iter().map(|tensor| (tensor.to_string(), (*name).into())));
        fs::write(dir.path().join(name), shard).unwrap();
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map}).to_string().into_bytes();
    let sound = [(INDEX, index), (names[0], shards[0].clone()), (names[1], shards[1].clone())];
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        fs::write(path, bytes).unwrap();
    };
    put(INDEX, &sound[0].1);
    assert_eq!(read(dir.path()).unwrap(), 8 * 16);
    for case in 0..INDICES {
        let (name, bytes) = &sound[[0, 0, 1, 2][case % 4]];
        let mut bytes = bytes.clone();
        if *name == INDEX {
            mutate(&mut random, &mut bytes)
        } else {
            mutate_file(&mut random, &mut bytes)
        }
        put(name, &bytes);
        let result = on(name, case, &bytes, || read(dir.path()));
        if name != &INDEX || result.is_ok() {
            tally.add(&result);
        } else {
            *tally.0.entry("index refused".to_string()).or_default() += 1;
        }
        put(name, &sound[[0, 0, 1, 2][case % 4]].1);
    }
    tally.print("mutated indices and shards");
}

/// Returns the error of opening a file of this header.
fn refusal(json: &str, data: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(FILE), with_header(json.as_bytes(), data)).unwrap();
    let error = read(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains(FILE) && error.contains("copy or download it again") || error.contains("copy it"),
        "{error}"
    );
    error
}

fn tensor(shape: &str, offsets: &str) -> String {
    format!(r#"{{"dtype":"U8","shape":{shape},"data_offsets":{offsets}}}"#)
}

#[test]
fn crafted_headers_are_refused() {
    for shape in ["[9223372036854775807,4]", "[4294967296,4294967296]", "[18446744073709551616]", "[-1]", "3", "[[2]]"]
    {
        refusal(&format!(r#"{{"a":{}}}"#, tensor(shape, "[0,2]")), &[0; 2]);
    }
    for offsets in ["[1,3]", "[2,0]", "[0,3]", "[0]", "[0,2,2]", "[18446744073709551613,18446744073709551615]", "null"]
    {
        refusal(&format!(r#"{{"a":{}}}"#, tensor("[2]", offsets)), &[0; 2]);
    }
    let two = |a: &str, b: &str| format!(r#"{{"a":{},"b":{}}}"#, tensor("[2]", a), tensor("[2]", b));
    refusal(&two("[0,2]", "[1,3]"), &[0; 3]);
    refusal(&two("[0,2]", "[3,5]"), &[0; 5]);
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}"), (r#"{"__metadata__":{"a":"#, "}}")] {
        refusal(&open.repeat(1_000_000), &[]);
        refusal(&format!("{}0{}", open.repeat(1_000_000), close.repeat(1_000_000)), &[]);
    }
    refusal("", &[]);
    refusal("\0", &[]);
    refusal("{\"a\":\"\u{7f}\"}", &[]);
}

#[test]
fn sizes_whose_sum_leaves_64_bits_are_refused() {
    // Sums of 8 such tensors end 8 bytes below 2^64, and the length of the header brings them over it.
    let size = (1u64 << 61) - 1;
    for entry in [
        |size: u64, begin: u64| tensor(&format!("[{size}]"), &format!("[{begin},{}]", begin + size)),
        // The same entry as a list, which readers take too.
        |size: u64, begin: u64| format!(r#"["U8",[{size}],[{begin},{}]]"#, begin + size),
    ] {
        let tensors: Vec<String> = (0..8).map(|at| format!(r#""{at}":{}"#, entry(size, at * size))).collect();
        assert!(
            refusal(&format!("{{{}}}", tensors.join(",")), &[0; 100]).contains("cannot be read as a safetensors file")
        );
    }
}

#[test]
fn lengths_that_are_lies_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let sound = file("");
    let truth = u64::from_le_bytes(sound[..8].try_into().unwrap());
    let end = sound.len() as u64;
    let lies = [0, 1, truth - 1, truth + 1, end - 9, end - 8, end - 7, end, 100_000_000, 100_000_001];
    for length in lies.into_iter().chain((31..64).map(|bits| 1 << bits)).chain([u64::MAX - 8, u64::MAX - 7, u64::MAX]) {
        fs::write(dir.path().join(FILE), [&length.to_le_bytes(), &sound[8..]].concat()).unwrap();
        assert!(read(dir.path()).unwrap_err().to_string().contains(FILE), "{length}");
    }
}

#[test]
fn a_name_that_comes_twice_is_one_tensor_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let json = format!(r#"{{"a":{0},"a":{0}}}"#, tensor("[2]", "[0,2]"));
    fs::write(dir.path().join(FILE), with_header(json.as_bytes(), &[0; 2])).unwrap();
    assert!(Checkpoint::open(dir.path()).map_or(0, |checkpoint| checkpoint.names().count()) <= 1);
}

#[test]
fn a_hundred_thousand_tiny_tensors_are_opened() {
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<String> = (0..100_000).map(|at| format!(r#""{at}":{}"#, tensor("[0]", "[0,0]"))).collect();
    fs::write(dir.path().join(FILE), with_header(format!("{{{}}}", tensors.join(",")).as_bytes(), &[])).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().names().count(), 100_000);
}
