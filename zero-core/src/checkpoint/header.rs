//! The header of a safetensors file: eight bytes of length, then JSON with the position of each tensor.
//!
//! The format: <https://huggingface.co/docs/safetensors/index>. The input is untrusted: a length is accepted only if the file is that long,
//! and tensors must tile the data without gap or overlap, which the `safetensors` crate checks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::marker::PhantomData;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::de::{Error as _, MapAccess, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Deserializer, Serialize};

use super::ElementType;
use super::disk::read_at;
use super::element::check;
use super::error::{CheckpointError, brief, io_at, parsing};

/// Key of the free-form metadata in a header.
pub(super) const METADATA: &str = "__metadata__";

/// Maximum header size that readers of the format accept.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Type, shape and position of one tensor in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HeaderEntry {
    /// Element type. [`ElementType`] may not support it: each reader checks for the types that it can use.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Start and end, in bytes from the end of the header.
    pub data_offsets: (u64, u64),
}

/// A header that has been checked against the size of its file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Header {
    /// Free-form texts about the file.
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
    /// [`CheckpointError::BadHeader`] if this is not the header of a file of this size, and errors of reading the file.
    pub fn read(file: &File, path: &Path) -> Result<Self, CheckpointError> {
        let bad = |reason: String| CheckpointError::BadHeader { path: path.to_path_buf(), reason };
        let file_bytes = file.metadata().map_err(io_at("read the metadata of", path))?.len();
        if file_bytes < 8 {
            return Err(bad(format!("expected 8 bytes for the header length, the file has {file_bytes}")));
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

    /// Parses a header's JSON. `data_bytes` is the number of bytes after it in the file.
    ///
    /// # Errors
    ///
    /// A description of the problem.
    pub fn parse(json: &[u8], data_bytes: u64) -> Result<Self, String> {
        let Members { metadata, tensors } = serde_json::from_slice::<Members<TensorInfo>>(json).map_err(parsing)?;
        let mut in_order: Vec<(String, TensorInfo)> = tensors.into_iter().collect();
        in_order.sort_by_key(|(_, info)| info.data_offsets);
        let mut found = BTreeMap::new();
        for (name, info) in &in_order {
            let of = |reason: String| format!("tensor '{}': {reason}", brief(name));
            check(info.dtype, &info.shape).map_err(of)?;
            let (begin, end) = info.data_offsets;
            let data_offsets = (begin as u64, end as u64);
            found.insert(name.clone(), HeaderEntry { dtype: info.dtype, shape: info.shape.clone(), data_offsets });
        }
        let checked = Metadata::new(None, in_order).map_err(brief)?;
        let expected = checked.data_len() as u64;
        if expected != data_bytes {
            return Err(format!("its tensors have {expected} bytes, the file has {data_bytes} after the header"));
        }
        Ok(Self { metadata: metadata.unwrap_or_default(), tensors: found, data_start: 8 + json.len() as u64 })
    }

    /// Returns the bytes before the first tensor, for tensors stored in this order, and the entry of each tensor. The first tensor starts
    /// at a multiple of 8.
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
            entries.push(HeaderEntry { dtype: (*dtype).into(), shape: shape.clone(), data_offsets: (next, end) });
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

/// The members of an object of tensors, as written, with unique names. The header parser of `safetensors` is not used: it takes four times
/// the memory, and silently keeps the last of two tensors of one name.
pub(super) struct Members<T> {
    pub(super) metadata: Option<BTreeMap<String, String>>,
    pub(super) tensors: BTreeMap<String, T>,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Members<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Reader<T> {
            type Value = Members<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<T>, A::Error> {
                let (mut metadata, mut tensors) = (None, BTreeMap::new());
                while let Some(name) = map.next_key::<String>()? {
                    let twice = |name: &str| Err(A::Error::custom(format!("'{}' appears twice", brief(name))));
                    if name == METADATA {
                        if metadata.replace(map.next_value()?).is_some() {
                            return twice(&name);
                        }
                        continue;
                    }
                    match tensors.entry(name) {
                        Entry::Occupied(there) => return twice(there.key()),
                        Entry::Vacant(free) => free.insert(map.next_value()?),
                    };
                }
                Ok(Members { metadata, tensors })
            }
        }
        deserializer.deserialize_map(Reader(PhantomData))
    }
}

/// A header to be written, with its tensors in the order of their bytes.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::edits::{edit, edits};
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
        assert_eq!(header.tensors.get("b").unwrap().data_offsets, (24, 27));
    }

    #[test]
    fn each_kind_of_damage_has_its_words() {
        let parse = |json: &str, bytes| Header::parse(json.as_bytes(), bytes).unwrap_err();
        let tensor = |begin: u64, end: u64| format!(r#"{{"dtype":"U8","shape":[2],"data_offsets":[{begin},{end}]}}"#);
        assert!(parse("[]", 0).contains("an object of tensors"));
        assert!(parse(&format!(r#"{{"a":{0},"a":{0}}}"#, tensor(0, 2)), 2).contains("'a' appears twice"));
        let overlap = format!(r#"{{"a":{},"b":{}}}"#, tensor(0, 2), tensor(1, 3));
        assert!(parse(&overlap, 3).contains("invalid offset for tensor `b`"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(1, 3)), 3).contains("invalid offset for tensor `a`"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(0, 3)), 3).contains("invalid shape"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(0, 2)), 3).contains("the file has 3"));
        assert!(parse(&format!(r#"{{"a":{}}}"#, tensor(0, 2).replace("U8", "Q8")), 3).contains("Q8"));
        let huge = r#"{"a":{"dtype":"F64","shape":[9223372036854775807,8],"data_offsets":[0,2]}}"#;
        assert!(parse(huge, 2).contains("larger than any file"));
    }

    #[test]
    fn all_that_the_format_allows_is_read() {
        let long = "n".repeat(1 << 10);
        let json = format!(
            "{{ \"{long}\" :\n{{\"data_offsets\": [0 , 2],\"shape\":[2],\"new\":[{{}}],\"dtype\":\"U8\"}},\t\"__metadata__\":\
             {{\"\":\"\",\"a\\n\\ud83d\\ude00\":\"{{\\\"b\\\":[]}}\"}}, \"\\u0061\":{{\"dtype\":\"F64\",\"shape\":[],\
             \"data_offsets\":[2,10]}}}}     "
        );
        let header = Header::parse(json.as_bytes(), 10).unwrap();
        assert_eq!(header.tensors.keys().collect::<Vec<_>>(), ["a", &long]);
        assert_eq!(header.tensors.get(&long).unwrap().shape, [2]);
        let texts = [("", ""), ("a\n\u{1f600}", "{\"b\":[]}")].map(|(name, text)| (name.to_string(), text.to_string()));
        assert_eq!(header.metadata, BTreeMap::from(texts));
        let other = br#"{"a":{"dtype":"F4","shape":[4],"data_offsets":[0,2]},"b":{"dtype":"C64","shape":[2],"data_offsets":[2,18]}}"#;
        assert_eq!(Header::parse(other, 18).unwrap().tensors["a"].dtype, Dtype::F4);
        let ours = Header::parse(br#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#, 0).unwrap();
        assert!(ours.metadata.is_empty() && Header::parse(b"{}", 0).unwrap().tensors.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50_000))]
        #[test]
        fn no_mutation_makes_it_panic(edits in edits(), data_bytes in prop_oneof![Just(27u64), any::<u64>()]) {
            let mut json = example()[8..].to_vec();
            edit(&mut json, edits);
            if let Ok(header) = Header::parse(&json, data_bytes) {
                let total: u64 = header.tensors.values().map(|entry| entry.data_offsets.1 - entry.data_offsets.0).sum();
                prop_assert_eq!(total, data_bytes);
            }
        }
    }
}
