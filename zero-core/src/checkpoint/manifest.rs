//! The manifest: what a checkpoint consists of, written last, so that a folder that has one is complete.
//!
//! It is one JSON object. Its first key is the crc32c of the bytes that follow it, at a fixed place, so that a damaged
//! or edited step, loss scale or random state is found like a damaged tensor. Keys that this version does not know are
//! ignored; a change that older readers must not ignore raises [`FORMAT_VERSION`].

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{CheckpointError, io_at};
use super::{ElementType, MANIFEST, rank_file};
use crate::Partition;

/// The format that is written, and the newest that is read.
pub const FORMAT_VERSION: u32 = 1;

const SEAL_BEGIN: &[u8] = br#"{"crc32c":""#;
const SEAL_END: &[u8] = br#"","#;
const SEAL_DIGITS: usize = 8;

/// What a checkpoint consists of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// See [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of the crate that wrote it.
    pub crate_version: String,
    /// Names this save: its files carry the same.
    pub id: String,
    /// The training step.
    pub step: u64,
    /// Number of ranks that saved it.
    pub world: usize,
    /// When it was saved, in milliseconds since 1970, and later than the one that was the latest before.
    pub saved_unix_ms: u64,
    /// One file per rank, in rank order.
    pub files: Vec<FileEntry>,
    /// Every tensor by name.
    #[serde(deserialize_with = "super::unique::map")]
    pub tensors: BTreeMap<String, TensorEntry>,
    /// What the engine gave, unchanged.
    pub state: Value,
}

/// One rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// One tensor as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the whole.
    pub shape: Vec<usize>,
    /// Checksum of each rank's piece, in rank order; none for a rank that has no elements of it.
    pub crc32c: Vec<Option<u32>>,
}

impl TensorEntry {
    /// Number of elements of the whole.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Manifest {
    /// Reads and checks the manifest in `folder`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`], [`CheckpointError::BadManifest`], [`CheckpointError::NewerFormat`], and what the
    /// system says.
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        match fs::read(&path) {
            Ok(bytes) => Self::parse(&bytes, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let what = if folder.is_dir() {
                    "the manifest, without which a checkpoint is not complete,"
                } else {
                    "the checkpoint"
                };
                Err(CheckpointError::Missing { what, path })
            }
            Err(error) => Err(io_at("read", &path)(error)),
        }
    }

    /// Reads and checks the bytes of a manifest; `path` is for the error.
    ///
    /// # Errors
    ///
    /// As [`Manifest::read`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u64,
            #[serde(default)]
            crate_version: String,
        }
        let bad = |reason: String| CheckpointError::BadManifest { path: path.to_path_buf(), reason };
        // Before the checksum, which another format may keep elsewhere.
        let version: Result<Version, _> = serde_json::from_slice(bytes);
        if let Ok(Version { format_version: version, crate_version: written_by }) = &version
            && *version > u64::from(FORMAT_VERSION)
        {
            let (path, written_by) = (path.to_path_buf(), written_by.clone());
            return Err(CheckpointError::NewerFormat {
                path,
                version: *version,
                supported: FORMAT_VERSION,
                written_by,
            });
        }
        let (expected, body) = unseal(bytes).ok_or_else(|| match version {
            Err(error) => bad(error.to_string()),
            Ok(_) => bad("it does not begin with its checksum".to_string()),
        })?;
        let got = crc32c::crc32c(body);
        if got != expected {
            return Err(bad(format!("expected crc32c {expected:08x}, its contents give {got:08x}")));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| bad(error.to_string()))?;
        manifest.check().map_err(bad)?;
        Ok(manifest)
    }

    /// The bytes to be written, which give this manifest when they are parsed.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadManifest`] when they would not, such as for a state nested too deep to be read.
    pub(super) fn encode(&self, path: &Path) -> Result<Vec<u8>, CheckpointError> {
        let bad = |reason: String| CheckpointError::BadManifest { path: path.to_path_buf(), reason };
        let json = serde_json::to_vec(self).map_err(|error| bad(error.to_string()))?;
        let body = [&json[1..], b"\n"].concat();
        let sum = format!("{:08x}", crc32c::crc32c(&body));
        let bytes = [SEAL_BEGIN, sum.as_bytes(), SEAL_END, &body].concat();
        if Self::parse(&bytes, path)? != *self {
            return Err(bad("what is read from it differs from what was written".to_string()));
        }
        Ok(bytes)
    }

    /// How a tensor of this checkpoint is cut.
    pub fn partition(&self, tensor: &TensorEntry) -> Partition {
        Partition::new(tensor.numel(), self.world)
    }

    fn check(&self) -> Result<(), String> {
        if self.format_version == 0 {
            return Err("expected a format from 1, got 0".to_string());
        }
        if self.world == 0 || self.files.len() != self.world {
            return Err(format!("{} ranks saved {} files, expected one per rank", self.world, self.files.len()));
        }
        for (rank, file) in self.files.iter().enumerate() {
            // Also keeps a manifest from naming a file outside of its folder.
            let expected = rank_file(rank, self.world);
            if file.name != expected {
                return Err(format!("rank {rank}'s file is named '{}', expected '{expected}'", file.name));
            }
        }
        for (name, tensor) in &self.tensors {
            if tensor.dtype.bytes_of(&tensor.shape).is_none() {
                return Err(format!("tensor '{name}', {} {:?}, is larger than any file", tensor.dtype, tensor.shape));
            }
            let partition = self.partition(tensor);
            let mut sums = tensor.crc32c.iter().enumerate();
            let fits = |(rank, sum): (usize, &Option<u32>)| sum.is_some() == (partition.len(rank) > 0);
            if tensor.crc32c.len() != self.world || !sums.all(fits) {
                return Err(format!(
                    "tensor '{name}' does not have one checksum for each rank that has elements of it"
                ));
            }
        }
        Ok(())
    }
}

/// The checksum that a manifest begins with, and the bytes that it is of.
fn unseal(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (digits, rest) = bytes.strip_prefix(SEAL_BEGIN)?.split_at_checked(SEAL_DIGITS)?;
    let digits = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    Some((u32::from_str_radix(digits, 16).ok()?, rest.strip_prefix(SEAL_END)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn example() -> Manifest {
        let tensor = TensorEntry { dtype: ElementType::F32, shape: vec![1], crc32c: vec![Some(7), None] };
        Manifest {
            format_version: FORMAT_VERSION,
            crate_version: "0.1.0".into(),
            id: "1-2".into(),
            step: 12,
            world: 2,
            saved_unix_ms: 5,
            files: (0..2).map(|rank| FileEntry { name: rank_file(rank, 2), bytes: 72 }).collect(),
            tensors: BTreeMap::from([("w".into(), tensor)]),
            state: json!({ "scale": 65536.0, "seed": u64::MAX }),
        }
    }

    fn seal(body: &str) -> Vec<u8> {
        format!(r#"{{"crc32c":"{:08x}",{body}"#, crc32c::crc32c(body.as_bytes())).into_bytes()
    }

    fn parse(bytes: &[u8]) -> Result<Manifest, CheckpointError> {
        Manifest::parse(bytes, Path::new("m"))
    }

    fn edited(from: &str, to: &str) -> Result<Manifest, CheckpointError> {
        let bytes = example().encode(Path::new("m")).unwrap();
        let body = String::from_utf8(bytes).unwrap().split_off(SEAL_BEGIN.len() + SEAL_DIGITS + SEAL_END.len());
        assert!(body.contains(from), "{body}");
        parse(&seal(&body.replacen(from, to, 1)))
    }

    #[test]
    fn a_later_format_is_told_before_anything_else() {
        let error = parse(br#"{"format_version":2,"crate_version":"3.0.0","new":[]}"#).unwrap_err().to_string();
        assert!(error.contains("format 2") && error.contains("3.0.0") && error.contains("update"), "{error}");
    }

    #[test]
    fn unknown_keys_are_ignored_and_contradictions_are_not() {
        assert_eq!(edited("\"step\":12", "\"step\":12,\"mood\":\"good\"").unwrap(), example());
        let reason = |from, to| edited(from, to).unwrap_err().to_string();
        assert!(reason("\"step\":12", "\"steps\":12").contains("missing field `step`"));
        assert!(reason("\"format_version\":1", "\"format_version\":0").contains("got 0"));
        assert!(reason("\"world\":2", "\"world\":3").contains("3 ranks saved 2 files"));
        assert!(reason("rank-00001-of", "../../etc/p-of").contains("expected 'rank-00001-of-00002.safetensors'"));
        assert!(reason("[1]", "[5000000000,5000000000]").contains("larger than any file"));
        assert!(reason("[1]", "[2]").contains("one checksum for each rank"));
        let twice = r#""w":{"dtype":"F32","shape":[0],"crc32c":[null,null]},"w":"#;
        assert!(reason("\"w\":", twice).contains("'w' comes twice"));
        assert!(reason("[7,null]", "[7]").contains("one checksum for each rank"));
    }

    #[test]
    fn floats_and_large_integers_of_the_state_are_exact() {
        let mut manifest = example();
        manifest.state = json!([0.1 + 0.2, f64::MIN_POSITIVE, 1.7976931348623157e308, u64::MAX, i64::MIN, 8.589973e-9]);
        manifest.encode(Path::new("m")).unwrap();
        let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
        manifest.state = deep;
        assert!(manifest.encode(Path::new("m")).unwrap_err().to_string().contains("recursion limit"));
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let bytes = example().encode(Path::new("m")).unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            match parse(&bytes) {
                Err(CheckpointError::BadManifest { .. } | CheckpointError::NewerFormat { .. }) => {}
                // A hexadecimal digit of the checksum in the other case says the same.
                Ok(manifest) => assert_eq!(manifest, example()),
                Err(other) => panic!("bit {bit}: {other}"),
            }
        }
    }

    /// What mutations insert: what JSON is made of.
    const JSON: &[u8] = b"0123456789[]{},:\"\\-eE";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50_000))]
        #[test]
        fn no_mutation_makes_it_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6),
            sealed in any::<bool>(),
        ) {
            let mut bytes = example().encode(Path::new("m")).unwrap();
            let begin = if sealed { SEAL_BEGIN.len() + SEAL_DIGITS + SEAL_END.len() } else { 0 };
            let mut body = bytes.split_off(begin);
            for (at, byte, kind) in edits {
                let at = at.index(body.len());
                match kind {
                    0 => body[at] = byte,
                    1 => body.insert(at, JSON[usize::from(byte) % JSON.len()]),
                    _ => { body.truncate(at.max(1)); }
                }
            }
            let sum = format!("{:08x}", crc32c::crc32c(&body));
            let bytes = if sealed { [SEAL_BEGIN, sum.as_bytes(), SEAL_END, &body].concat() } else { body };
            if let Ok(manifest) = parse(&bytes) {
                prop_assert_eq!(manifest.files.len(), manifest.world);
            }
        }
    }
}
