//! What a manifest says of one tensor, as JSON and as a record of a [`Table`].

use serde::Serialize;

use super::element::{parse_shape, put_kind, take_kind};
use super::json::{self, brief};
use super::table::{Record, put_end, put_number, take_number};
use super::{ElementType, Table};
use crate::Partition;

/// One tensor as a whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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

    /// What is written as `json`, of a checkpoint of `world` ranks.
    fn parse(json: &str, world: usize) -> Result<Self, String> {
        const FIELDS: [&str; 3] = ["dtype", "shape", "crc32c"];
        let found = json::fields(json, "an object", FIELDS)?;
        let [dtype, shape, sums] = json::required(FIELDS, found)?;
        let (dtype, shape) = (ElementType::parse(dtype)?, parse_shape(shape)?);
        if dtype.bytes_of(&shape).is_none() {
            return Err(format!("{dtype} {} is larger than any file", brief(format_args!("{shape:?}"))));
        }
        let what = "a list of checksums";
        let mut entry = Self { dtype, shape, crc32c: Vec::new() };
        if json::count_elements(sums, what)? == world {
            // As many as there are files, each of which takes more bytes of the manifest.
            entry.crc32c.reserve_exact(world);
            json::elements(sums, what, |sum| {
                let sum = if sum == "null" { None } else { Some(json::number(sum, "crc32c")?) };
                entry.crc32c.push(sum);
                Ok(())
            })?;
        }
        let partition = Partition::new(entry.numel(), world);
        let mut sums = entry.crc32c.iter().enumerate();
        let fits = |(rank, sum): (usize, &Option<u32>)| sum.is_some() == (partition.len(rank) > 0);
        if entry.crc32c.len() != world || !sums.all(fits) {
            return Err("it does not have one checksum for each rank that has elements of it".to_string());
        }
        Ok(entry)
    }

    fn write(&self, record: &mut Vec<u8>) {
        put_kind(record, self.dtype, &self.shape);
        put_number(record, self.crc32c.len() as u64);
        // None is 0, and a sum one more than it is.
        self.crc32c.iter().for_each(|sum| put_number(record, sum.map_or(0, |sum| u64::from(sum) + 1)));
    }
}

impl Record for TensorEntry {
    type View<'t> = TensorEntry;

    fn read(record: &mut &[u8]) -> Self {
        let (dtype, shape) = take_kind(record);
        let ranks = take_number(record);
        let crc32c = (0..ranks).map(|_| take_number(record).checked_sub(1).map(|sum| sum as u32)).collect();
        Self { dtype, shape, crc32c }
    }
}

impl FromIterator<(String, TensorEntry)> for Table<TensorEntry> {
    fn from_iter<I: IntoIterator<Item = (String, TensorEntry)>>(entries: I) -> Self {
        let mut table = Self::default();
        for (name, entry) in entries {
            let record = table.begin();
            record.extend_from_slice(name.as_bytes());
            put_end(record);
            entry.write(record);
        }
        table.sort();
        table.keep_last();
        table
    }
}

/// The tensors that are written as `json`, of a checkpoint of `world` ranks, of each of which a file has been seen.
pub(super) fn parse_tensors(json: &str, world: usize) -> Result<Table<TensorEntry>, String> {
    let what = "an object of tensors by name";
    let mut tensors = Table::with_room(json.len(), json::count_members(json, what)?);
    json::members(json, what, |name, value| {
        let of = |reason| format!("tensor '{}': {reason}", json::shown(name));
        let entry = TensorEntry::parse(value, world).map_err(of)?;
        let record = tensors.begin();
        json::unescape(name, record).map_err(of)?;
        put_end(record);
        entry.write(record);
        Ok(())
    })?;
    tensors.sort();
    match tensors.twice() {
        Some(name) => Err(format!("'{}' comes twice", brief(name))),
        None => Ok(tensors),
    }
}
