//! Things by name, in less memory than the JSON takes that says them.
//!
//! All are in one allocation: for each its name, a byte that no text has, and its numbers, seven bits to a byte, of which
//! there are never more than digits. Another allocation has four bytes for each, where it begins. What is asked for is made
//! from that.

use core::fmt::{self, Debug, Formatter};
use core::marker::PhantomData;

/// Ends a text: no byte of UTF-8.
const END: u8 = 0xff;

/// What a [`Table`] holds under each name.
pub trait Record {
    /// What it gives.
    type View<'t>;

    /// What is written in `bytes`, which then begin behind it.
    fn read<'t>(bytes: &mut &'t [u8]) -> Self::View<'t>;
}

/// Read-only things by name, in the order of the names. They are made when they are asked for.
pub struct Table<V: ?Sized> {
    records: Vec<u8>,
    /// Where each record begins, in the order of the names.
    starts: Vec<u32>,
    kind: PhantomData<fn() -> Box<V>>,
}

impl<V: Record + ?Sized> Table<V> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// The one of this name.
    pub fn get(&self, name: &str) -> Option<V::View<'_>> {
        self.place(name).map(|place| self.at(place).1)
    }

    /// Whether there is one of this name.
    pub fn contains_key(&self, name: &str) -> bool {
        self.place(name).is_some()
    }

    /// All of them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, V::View<'_>)> {
        (0..self.len()).map(|place| self.at(place))
    }

    /// All names.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.starts.iter().map(|&start| text(name_at(&self.records, start)))
    }

    /// All of them, without their names.
    pub fn values(&self) -> impl ExactSizeIterator<Item = V::View<'_>> {
        self.iter().map(|(_, view)| view)
    }

    /// Those whose names begin so.
    pub fn starting_with(&self, prefix: &str) -> impl Iterator<Item = (&str, V::View<'_>)> {
        let first = self.starts.partition_point(|&start| name_at(&self.records, start) < prefix.as_bytes());
        (first..self.len()).map(|place| self.at(place)).take_while(move |(name, _)| name.starts_with(prefix))
    }

    /// Which in order the one of this name is.
    pub(super) fn place(&self, name: &str) -> Option<usize> {
        self.starts.binary_search_by(|&start| name_at(&self.records, start).cmp(name.as_bytes())).ok()
    }

    /// Name and view by place in order.
    pub(super) fn at(&self, place: usize) -> (&str, V::View<'_>) {
        let mut bytes = &self.records[self.starts[place] as usize..];
        (take_text(&mut bytes), V::read(&mut bytes))
    }
}

impl<V: ?Sized> Table<V> {
    /// An empty one that never grows while it takes `count` members of a JSON object of `bytes`, and takes no more memory
    /// than that: quotes, colon and comma of `"name":"text",` are 6 bytes, and so are the ends of two texts and a start.
    pub(super) fn with_room(bytes: usize, count: usize) -> Self {
        let records = Vec::with_capacity(bytes.saturating_sub(size_of::<u32>() * count));
        Self { records, starts: Vec::with_capacity(count), kind: PhantomData }
    }

    /// Where the next record is to be written: its name first.
    pub(super) fn begin(&mut self) -> &mut Vec<u8> {
        let start = u32::try_from(self.records.len()).expect("names and numbers of less than 4 GiB");
        self.starts.push(start);
        &mut self.records
    }

    /// Puts all in the order of their names; must come after the last one. Of two with one name, the later comes later.
    pub(super) fn sort(&mut self) {
        let Self { records, starts, .. } = self;
        starts.sort_unstable_by(|&a, &b| name_at(records, a).cmp(name_at(records, b)).then(a.cmp(&b)));
    }

    /// Puts all in the order of what their records begin with, and then of their names, until [`Table::sort`] is called.
    pub(super) fn sort_by<K: Ord>(&mut self, key: impl Fn(&mut &[u8]) -> K) {
        let Self { records, starts, .. } = self;
        let key = |start: u32| {
            let (name, mut rest) = split_name(&records[start as usize..]);
            (key(&mut rest), name)
        };
        starts.sort_unstable_by(|&a, &b| key(a).cmp(&key(b)));
    }

    /// A name that comes twice.
    pub(super) fn twice(&self) -> Option<&str> {
        let names = |pair: &&[u32]| name_at(&self.records, pair[0]) == name_at(&self.records, pair[1]);
        self.starts.windows(2).find(names).map(|pair| text(name_at(&self.records, pair[0])))
    }

    /// Drops all but the last of each name.
    pub(super) fn keep_last(&mut self) {
        let Self { records, starts, .. } = self;
        starts.dedup_by(|later, kept| {
            let same = name_at(records, *later) == name_at(records, *kept);
            if same {
                *kept = *later;
            }
            same
        });
    }
}

impl<V: ?Sized> Default for Table<V> {
    fn default() -> Self {
        Self::with_room(0, 0)
    }
}

impl<V: ?Sized> Clone for Table<V> {
    fn clone(&self) -> Self {
        Self { records: self.records.clone(), starts: self.starts.clone(), kind: PhantomData }
    }
}

impl<V: Record + ?Sized> PartialEq for Table<V>
where
    for<'t> V::View<'t>: PartialEq,
{
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl<V: Record + ?Sized> Debug for Table<V>
where
    for<'t> V::View<'t>: Debug,
{
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl Record for str {
    type View<'t> = &'t str;

    fn read<'t>(bytes: &mut &'t [u8]) -> &'t str {
        take_text(bytes)
    }
}

/// Ends a text that has been written.
pub(super) fn put_end(out: &mut Vec<u8>) {
    out.push(END);
}

/// Writes a number.
pub(super) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads a number.
pub(super) fn take_number(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    loop {
        let (&byte, rest) = bytes.split_first().expect("a number that was written has an end");
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return number;
        }
        shift += 7;
    }
}

/// Reads a text.
fn take_text<'t>(bytes: &mut &'t [u8]) -> &'t str {
    let (name, rest) = split_name(bytes);
    *bytes = rest;
    text(name)
}

fn split_name(record: &[u8]) -> (&[u8], &[u8]) {
    let end = record.iter().position(|&byte| byte == END).expect("a text that was written has an end");
    (&record[..end], &record[end + 1..])
}

fn name_at(records: &[u8], start: u32) -> &[u8] {
    split_name(&records[start as usize..]).0
}

fn text(bytes: &[u8]) -> &str {
    core::str::from_utf8(bytes).expect("only texts are written as texts")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(entries: &[(String, String)]) -> Table<str> {
        let mut table = Table::default();
        for (name, value) in entries {
            let out = table.begin();
            for text in [name, value] {
                out.extend_from_slice(text.as_bytes());
                put_end(out);
            }
        }
        table.sort();
        table
    }

    proptest! {
        #[test]
        fn it_is_a_map(entries: Vec<(String, String)>, other: String) {
            let map: std::collections::BTreeMap<_, _> = entries.iter().cloned().collect();
            let mut table = table(&entries);
            prop_assert_eq!(table.twice().is_some(), map.len() < entries.len());
            table.keep_last();
            let pairs = |(name, value): (&str, &str)| (name.to_string(), value.to_string());
            prop_assert!(table.iter().map(pairs).eq(map.clone()));
            prop_assert_eq!(table.get(&other), map.get(&other).map(String::as_str));
            prop_assert!(table.keys().all(|name| table.get(name) == Some(&map[name])));
            let prefix: String = other.chars().take(1).collect();
            prop_assert!(table.starting_with(&prefix).map(pairs).eq(map.into_iter().filter(|(n, _)| n.starts_with(&prefix))));
        }

        #[test]
        fn a_number_takes_no_more_bytes_than_digits(number: u64, bits in 0u32..64) {
            let number = number >> bits;
            let mut bytes = Vec::new();
            put_number(&mut bytes, number);
            prop_assert!(bytes.len() <= number.to_string().len());
            prop_assert_eq!(take_number(&mut &bytes[..]), number);
        }
    }
}
