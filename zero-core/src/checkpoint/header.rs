//! The header of a safetensors file: eight bytes of length, then JSON that says where each tensor lies.
//!
//! The format: <https://huggingface.co/docs/safetensors/index>. What is read here is not trusted: a length counts only
//! when the file is as long, tensors must tile the data without gap or overlap, and a name may come only once. What is
//! allocated is in proportion to bytes that are in the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};

use super::ElementType;
use super::disk::read_at;
use super::error::{CheckpointError, io_at};

/// The key under which a header has texts about the file.
const METADATA: &str = "__metadata__";

/// The longest header that readers of the format accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Where and what one tensor of a file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderEntry {
    /// Element type.
    pub dtype: ElementType,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// First byte and end, counted from the first byte after the header.
    pub data_offsets: (u64, u64),
}

/// A header that has been checked against the size of its file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Header {
    /// Texts about the file.
    pub metadata: BTreeMap<String, String>,
    /// The tensors by name.
    pub tensors: BTreeMap<String, HeaderEntry>,
    /// Bytes before the first tensor.
    pub data_start: u64,
}

impl Header {
    /// Reads the header of an open safetensors file.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::BadHeader`] for anything that is no header of a file of this size, and what the system says.
    pub fn read(file: &File, path: &Path) -> Result<Self, CheckpointError> {
        let bad = |reason: String| CheckpointError::BadHeader { path: path.to_path_buf(), reason };
        let file_bytes = file.metadata().map_err(io_at("look at", path))?.len();
        if file_bytes < 8 {
            return Err(bad(format!("expected 8 bytes of length, the file has {file_bytes}")));
        }
        let mut length = [0; 8];
        read_at(file, path, &mut length, 0)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER_BYTES.min(file_bytes - 8) {
            return Err(bad(format!("it claims {length} bytes, the file has {file_bytes}")));
        }
        let mut json = vec![0; length as usize];
        read_at(file, path, &mut json, 8)?;
        Self::parse(&json, file_bytes - 8 - length).map_err(bad)
    }

    /// Reads a header's JSON; `data_bytes` follow it in the file.
    ///
    /// # Errors
    ///
    /// What is wrong with it, in words.
    pub fn parse(json: &[u8], data_bytes: u64) -> Result<Self, String> {
        let mut header: Header = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        header.data_start = 8 + json.len() as u64;
        let mut in_order: Vec<(&String, &HeaderEntry)> = header.tensors.iter().collect();
        in_order.sort_by_key(|(_, entry)| entry.data_offsets);
        let mut next = 0;
        for (name, entry) in in_order {
            let (begin, end) = entry.data_offsets;
            if begin != next || end < begin {
                return Err(format!("tensor '{name}' lies at {begin}..{end}, expected it to begin at {next}"));
            }
            let expected = entry.dtype.bytes_of(&entry.shape);
            if expected != Some(end - begin) {
                return Err(format!(
                    "tensor '{name}', {} {:?}, has {} bytes, which is not what its shape needs",
                    entry.dtype,
                    entry.shape,
                    end - begin
                ));
            }
            next = end;
        }
        if next != data_bytes {
            return Err(format!("its tensors have {next} bytes, the file has {data_bytes} after the header"));
        }
        Ok(header)
    }

    /// The bytes before the first tensor, for tensors that follow each other in this order, and where each will lie.
    /// The first lies at a multiple of 8.
    pub(super) fn encode(
        metadata: &BTreeMap<String, String>,
        tensors: &[(String, ElementType, Vec<usize>)],
    ) -> Result<(Vec<u8>, Vec<HeaderEntry>), CheckpointError> {
        let mut next = 0u64;
        let mut entries = Vec::with_capacity(tensors.len());
        for (name, dtype, shape) in tensors {
            let end = dtype.bytes_of(shape).and_then(|bytes| next.checked_add(bytes));
            let end = end.ok_or_else(|| CheckpointError::Unfit {
                tensor: name.clone(),
                expected: "a size that a file can have".to_string(),
                got: format!("{dtype} {shape:?}"),
            })?;
            entries.push(HeaderEntry { dtype: *dtype, shape: shape.clone(), data_offsets: (next, end) });
            next = end;
        }
        let names = tensors.iter().map(|(name, ..)| name.as_str());
        let list: Vec<(&str, &HeaderEntry)> = names.zip(&entries).collect();
        let mut json = serde_json::to_vec(&InOrder { metadata, list: &list })
            .expect("texts and numbers have a JSON form, and a vector takes them");
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.append(&mut json);
        Ok((bytes, entries))
    }
}

/// A header to be written, its tensors in the order of their bytes.
struct InOrder<'a> {
    metadata: &'a BTreeMap<String, String>,
    list: &'a [(&'a str, &'a HeaderEntry)],
}

impl Serialize for InOrder<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry(METADATA, self.metadata)?;
        for (name, entry) in self.list {
            map.serialize_entry(name, entry)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header::default();
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    let twice = if name == METADATA {
                        header.metadata = map.next_value()?;
                        std::mem::replace(&mut has_metadata, true)
                    } else {
                        header.tensors.insert(name.clone(), map.next_value()?).is_some()
                    };
                    if twice {
                        return Err(A::Error::custom(format!("'{name}' comes twice")));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Vec<u8> {
        let metadata = BTreeMap::from([("rank".to_string(), "0".to_string())]);
        let tensors = [("w".to_string(), ElementType::F32, vec![2, 3]), ("b".to_string(), ElementType::U8, vec![3])];
        Header::encode(&metadata, &tensors).unwrap().0
    }

    #[test]
    fn what_is_encoded_is_parsed() {
        let bytes = example();
        assert_eq!(bytes.len() % 8, 0);
        let header = Header::parse(&bytes[8..], 27).unwrap();
        assert_eq!(header.data_start, bytes.len() as u64);
        assert_eq!(header.metadata["rank"], "0");
        assert_eq!(header.tensors["b"].data_offsets, (24, 27));
    }

    #[test]
    fn each_kind_of_damage_has_its_words() {
        let parse = |json: &str, bytes| Header::parse(json.as_bytes(), bytes).unwrap_err();
        let tensor = |begin: u64, end: u64| format!(r#"{{"dtype":"U8","shape":[2],"data_offsets":[{begin},{end}]}}"#);
        assert!(parse("[]", 0).contains("an object of tensors"));
        assert!(parse(&format!(r#"{{"a":{0},"a":{0}}}"#, tensor(0, 2)), 2).contains("'a' comes twice"));
        assert!(
            parse(&format!(r#"{{"a":{},"b":{}}}"#, tensor(0, 2), tensor(1, 3)), 3).contains("expected it to begin")
        );
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(1, 3)), 3).contains("expected it to begin at 0"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(0, 3)), 3).contains("not what its shape needs"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(0, 2)), 3).contains("the file has 3"));
        assert!(parse(&tensor(0, 2).replace("U8", "Q8"), 3).contains("invalid type"));
        let huge = r#"{"a":{"dtype":"F64","shape":[9223372036854775807,8],"data_offsets":[0,2]}}"#;
        assert!(parse(huge, 2).contains("not what its shape needs"));
    }

    /// What mutations insert: what JSON is made of.
    const JSON: &[u8] = b"0123456789[]{},:\"\\-eE";

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50_000))]
        #[test]
        fn no_mutation_makes_it_panic(
            edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..6),
            data_bytes in prop_oneof![Just(27u64), any::<u64>()],
        ) {
            let mut json = example()[8..].to_vec();
            for (at, byte, kind) in edits {
                let at = at.index(json.len());
                match kind {
                    0 => json[at] = byte,
                    1 => json.insert(at, JSON[usize::from(byte) % JSON.len()]),
                    _ => { json.truncate(at.max(1)); }
                }
            }
            if let Ok(header) = Header::parse(&json, data_bytes) {
                let total: u64 = header.tensors.values().map(|entry| entry.data_offsets.1 - entry.data_offsets.0).sum();
                prop_assert_eq!(total, data_bytes);
            }
        }
    }
}
