//! The manifest: the contents of a checkpoint. It is written last, so that a folder with a manifest is complete.
//!
//! It is one JSON object. Its first key is the crc32c of the bytes that follow it, at a fixed position, so that a damaged or edited step,
//! loss scale or random state is detected like a damaged tensor. Unknown keys are ignored; a change that older readers must not ignore
//! raises [`FORMAT_VERSION`].

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

use super::ElementType;
use super::element::check;
use super::error::{CheckpointError, brief, io_at, parsing};
use super::header::{METADATA, Members};
use super::names::{MANIFEST, rank_file};
use crate::{Partition, files};

/// Maximum size of a manifest in bytes: that of 10,000 tensors on 10,000 ranks.
const LARGEST: u64 = 1 << 30;

/// Maximum nesting depth that serde_json reads.
const MAX_DEPTH: usize = 126;

/// The format version that is written, and the newest that is read.
pub const FORMAT_VERSION: u32 = 1;

const SEAL_BEGIN: &[u8] = br#"{"crc32c":""#;
const SEAL_END: &[u8] = br#"","#;
const SEAL_DIGITS: usize = 8;

/// The check that [`find_latest`](super::find_latest) makes before it takes a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The manifest, and the presence, size and matching header of every file. Takes milliseconds.
    Sizes,
    /// Also every byte of every tensor. Takes as long as reading the checkpoint.
    Contents,
}

/// One full tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions of the full tensor.
    pub shape: Vec<usize>,
    /// Checksum of each rank's shard, in rank order; `None` for a rank without elements.
    pub crc32c: Vec<Option<u32>>,
}

impl TensorEntry {
    /// Returns the number of elements of the full tensor.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Checks that it can belong to a checkpoint of `world` ranks.
    fn check(&self, world: usize) -> Result<(), String> {
        check(self.dtype.into(), &self.shape)?;
        let partition = Partition::new(self.numel(), world);
        let fits = |(rank, sum): (usize, &Option<u32>)| sum.is_some() == (partition.len(rank) > 0);
        if self.crc32c.len() != world || !self.crc32c.iter().enumerate().all(fits) {
            return Err("expected one checksum for each rank that holds elements of it".to_string());
        }
        Ok(())
    }
}

/// The contents of a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// See [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Version of the crate that wrote it.
    pub crate_version: String,
    /// Identifier of this save, which its files carry too.
    pub id: String,
    /// The training step.
    pub step: u64,
    /// Number of ranks that saved it.
    pub world: usize,
    /// Time of the save, in milliseconds since 1970; always later than that of the previous latest checkpoint.
    pub saved_unix_ms: u64,
    /// The size of each rank's file, in rank order.
    #[serde(rename = "files", serialize_with = "write_files", deserialize_with = "read_files")]
    pub file_bytes: Vec<u64>,
    /// Every tensor by name.
    #[serde(deserialize_with = "read_tensors")]
    pub tensors: BTreeMap<String, TensorEntry>,
    /// State of the engine as JSON text; its parsed values would take many times as much memory.
    #[serde(serialize_with = "write_raw", deserialize_with = "read_raw")]
    pub(super) state: Box<str>,
}

/// A rank's file in a manifest. Its fixed name also keeps a manifest from naming a file outside its folder.
#[derive(Serialize, Deserialize)]
struct RankFile {
    name: String,
    bytes: u64,
}

fn write_files<S: Serializer>(file_bytes: &[u64], serializer: S) -> Result<S::Ok, S::Error> {
    let file = |(rank, &bytes)| RankFile { name: rank_file(rank, file_bytes.len()), bytes };
    serializer.collect_seq(file_bytes.iter().enumerate().map(file))
}

fn read_files<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    let files = Vec::<RankFile>::deserialize(deserializer)?;
    for (rank, file) in files.iter().enumerate() {
        let expected = rank_file(rank, files.len());
        if file.name != expected {
            let name = brief(&file.name);
            return Err(D::Error::custom(format!("rank {rank}'s file is named '{name}', expected '{expected}'")));
        }
    }
    Ok(files.into_iter().map(|file| file.bytes).collect())
}

fn read_tensors<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, TensorEntry>, D::Error> {
    match Members::deserialize(deserializer)? {
        Members { metadata: None, tensors } => Ok(tensors),
        _ => Err(D::Error::custom(format!("no tensor may be named '{METADATA}'"))),
    }
}

fn write_raw<S: Serializer>(json: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serde_json::from_str::<&RawValue>(json).map_err(serde::ser::Error::custom)?.serialize(serializer)
}

fn read_raw<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Box<str>, D::Error> {
    Ok(<&RawValue>::deserialize(deserializer)?.get().into())
}

/// The fields that are read from a manifest of any format.
#[derive(Deserialize)]
struct AnyFormat {
    format_version: u64,
    #[serde(default)]
    crate_version: Value,
}

impl Manifest {
    /// Reads and checks the manifest in `folder`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Missing`], [`CheckpointError::BadManifest`], [`CheckpointError::NewerFormat`], and [`CheckpointError::Io`].
    pub fn read(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        match files::read(&path, LARGEST) {
            Ok(bytes) => Self::parse(&bytes, &path),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let what =
                    if folder.is_dir() { "the manifest that marks a checkpoint as complete" } else { "the checkpoint" };
                Err(CheckpointError::Missing { what, path })
            }
            Err(error) => Err(io_at("read", &path)(error)),
        }
    }

    /// Parses and checks the bytes of a manifest, except the contents of the state. `path` is for error messages.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadManifest`] and [`CheckpointError::NewerFormat`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, CheckpointError> {
        let bad = |reason: String| CheckpointError::BadManifest { path: path.to_path_buf(), reason };
        // Checked before the checksum, which another format may keep elsewhere.
        if let Ok(AnyFormat { format_version: version, crate_version }) = serde_json::from_slice(bytes)
            && version > u64::from(FORMAT_VERSION)
        {
            let (path, written_by) = (path.to_path_buf(), crate_version.as_str().map_or(String::new(), brief));
            return Err(CheckpointError::NewerFormat { path, version, supported: FORMAT_VERSION, written_by });
        }
        let read: Result<Self, String> = serde_json::from_slice(bytes).map_err(parsing);
        let Some((expected, body)) = unseal(bytes) else {
            return Err(bad(read.err().unwrap_or("it does not begin with its checksum".to_string())));
        };
        let got = crc32c::crc32c(body);
        if got != expected {
            return Err(bad(format!("expected crc32c {expected:08x}, its contents give {got:08x}")));
        }
        read.and_then(|manifest| manifest.check().map(|()| manifest)).map_err(bad)
    }

    fn check(&self) -> Result<(), String> {
        if self.format_version == 0 {
            return Err("expected format 1 or later, got 0".to_string());
        }
        if depth(&self.state) > MAX_DEPTH {
            return Err(format!("recursion limit exceeded: its state is nested more than {MAX_DEPTH} levels deep"));
        }
        let (world, files) = (self.world, self.file_bytes.len());
        if world == 0 || files != world {
            return Err(format!("{world} ranks saved {files} files, expected one per rank"));
        }
        let check = |(name, tensor): (&String, &TensorEntry)| {
            tensor.check(world).map_err(|reason| format!("tensor '{}': {reason}", brief(name)))
        };
        self.tensors.iter().try_for_each(check)
    }

    /// Returns the bytes to write, which parse to this manifest again.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadManifest`] if they would not, for example if the state is nested too deeply.
    pub(super) fn encode(&self, path: &Path) -> Result<Vec<u8>, CheckpointError> {
        let bad = |reason: String| CheckpointError::BadManifest { path: path.to_path_buf(), reason };
        let json = serde_json::to_vec(self).map_err(|error| bad(error.to_string()))?;
        let body = [&json[1..], b"\n"].concat();
        let sum = format!("{:08x}", crc32c::crc32c(&body));
        let bytes = [SEAL_BEGIN, sum.as_bytes(), SEAL_END, &body].concat();
        let read = Self::parse(&bytes, path)?;
        let state = read.state_at(path)?.to_string();
        if read != *self || *state != *self.state {
            return Err(bad("reading it back gives different contents".to_string()));
        }
        Ok(bytes)
    }

    /// Returns the state that the engine saved, unchanged. `folder`, which the manifest was read from, is for error messages. Each call
    /// parses the values, which take many times as much memory as in the file.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadManifest`] if it has a number that is too large, or half of a `\u` surrogate pair.
    pub fn state(&self, folder: &Path) -> Result<Value, CheckpointError> {
        self.state_at(&folder.join(MANIFEST))
    }

    fn state_at(&self, path: &Path) -> Result<Value, CheckpointError> {
        serde_json::from_str(&self.state).map_err(|error| {
            let reason = format!("its state cannot be read: {error}");
            CheckpointError::BadManifest { path: path.to_path_buf(), reason }
        })
    }

    /// Returns the partition of a tensor of this checkpoint.
    pub fn partition(&self, tensor: &TensorEntry) -> Partition {
        Partition::new(tensor.numel(), self.world)
    }
}

/// Returns the nesting depth of a JSON text.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_text, mut escaped) = (0usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_text,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// Returns the checksum at the start of a manifest, and the bytes that it covers.
fn unseal(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (digits, rest) = bytes.strip_prefix(SEAL_BEGIN)?.split_at_checked(SEAL_DIGITS)?;
    let digits = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    Some((u32::from_str_radix(digits, 16).ok()?, rest.strip_prefix(SEAL_END)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::edits::{edit, edits};
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
            file_bytes: vec![72; 2],
            tensors: BTreeMap::from([("w".into(), tensor)]),
            state: json!({ "scale": 65536.0, "seed": u64::MAX }).to_string().into(),
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
        assert!(reason("\"w\":", twice).contains("'w' appears twice"));
        assert!(reason("[7,null]", "[7]").contains("one checksum for each rank"));
    }

    #[test]
    fn floats_and_large_integers_of_the_state_are_exact() {
        let mut manifest = example();
        let state = json!([0.1 + 0.2, f64::MIN_POSITIVE, 1.7976931348623157e308, u64::MAX, i64::MIN, 8.589973e-9]);
        manifest.state = state.to_string().into();
        let read = parse(&manifest.encode(Path::new("m")).unwrap()).unwrap();
        assert_eq!(read.state(Path::new("m")).unwrap(), state);
        let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
        manifest.state = deep.to_string().into();
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50_000))]
        #[test]
        fn no_mutation_makes_it_panic(edits in edits(), sealed in any::<bool>()) {
            let mut bytes = example().encode(Path::new("m")).unwrap();
            let begin = if sealed { SEAL_BEGIN.len() + SEAL_DIGITS + SEAL_END.len() } else { 0 };
            let mut body = bytes.split_off(begin);
            edit(&mut body, edits);
            let sum = format!("{:08x}", crc32c::crc32c(&body));
            let bytes = if sealed { [SEAL_BEGIN, sum.as_bytes(), SEAL_END, &body].concat() } else { body };
            if let Ok(manifest) = parse(&bytes) {
                prop_assert_eq!(manifest.file_bytes.len(), manifest.world);
            }
        }
    }
}
