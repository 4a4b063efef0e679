//! Which bytes of a swap file are whose.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers the allocations of all files of the process, so that a region is one file's, and one allocation's.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A piece of a swap file, until it is freed: `bytes` bytes at `offset`, and on the disk what pads them to the
/// alignment, so that any length can be moved. A copy of one that was freed, or one of another file, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    offset: u64,
    bytes: usize,
    alignment: usize,
    /// Of the allocation that it is, or is a part of.
    number: u64,
}

impl Region {
    /// The first byte's place in the file, a multiple of the file's alignment.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Bytes asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes taken on the disk, and moved by a transfer.
    pub fn padded_bytes(&self) -> usize {
        self.bytes.next_multiple_of(self.alignment)
    }

    /// The region in parts of at most `part_bytes`, rounded down to the alignment, for buffers smaller than the region.
    /// A part is used like a region; only the whole can be freed.
    ///
    /// # Panics
    /// If `part_bytes` is less than the alignment.
    pub fn parts(&self, part_bytes: usize) -> impl Iterator<Item = Region> + use<> {
        let region = *self;
        let step = part_bytes / region.alignment * region.alignment;
        assert!(step > 0, "parts of {part_bytes} bytes are less than the alignment of {}", region.alignment);
        (0..region.bytes).step_by(step).map(move |start| Region {
            offset: region.offset + start as u64,
            bytes: step.min(region.bytes - start),
            alignment: region.alignment,
            number: region.number,
        })
    }

    /// The byte after the last one on the disk.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.padded_bytes() as u64
    }

    /// Whether the two share a byte on the disk.
    pub(crate) fn overlaps(&self, other: &Region) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// The free and the allocated ranges of a file. Every free range is joined with its free neighbours.
pub(crate) struct Regions {
    alignment: usize,
    /// Offset of each free range, with its bytes.
    free: BTreeMap<u64, u64>,
    /// Offset of each allocated range, with its bytes and its number.
    used: BTreeMap<u64, (u64, u64)>,
    /// Bytes of the file that may be allocated.
    end: u64,
}

impl Regions {
    pub(crate) fn new(alignment: usize) -> Self {
        Self { alignment, free: BTreeMap::new(), used: BTreeMap::new(), end: 0 }
    }

    /// Bytes of the file that may be allocated, are so or not.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that are not allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// By how much the file must grow for a region of `bytes`.
    pub(crate) fn missing(&self, bytes: usize) -> u64 {
        let need = bytes.next_multiple_of(self.alignment) as u64;
        if self.fitting(need).is_some() {
            return 0;
        }
        // A free range at the end is part of what the growth is joined with.
        let last = self.free.last_key_value().filter(|(offset, len)| **offset + **len == self.end);
        need - last.map_or(0, |(_, len)| *len)
    }

    /// The file has `bytes` more, whole alignments.
    pub(crate) fn grow(&mut self, bytes: u64) {
        let start = self.end;
        self.end += bytes;
        self.join(start, bytes);
    }

    /// Allocates the smallest range that fits, at the lowest offset among equals.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Region> {
        let alignment = self.alignment;
        // Relaxed: numbers need only differ.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        if bytes == 0 {
            return Some(Region { offset: 0, bytes, alignment, number });
        }
        let need = bytes.next_multiple_of(alignment) as u64;
        let (offset, len) = self.fitting(need)?;
        self.free.remove(&offset);
        if len > need {
            self.free.insert(offset + need, len - need);
        }
        self.used.insert(offset, (need, number));
        Some(Region { offset, bytes, alignment, number })
    }

    /// Frees what `take` returned; false if it is not allocated.
    pub(crate) fn give(&mut self, region: &Region) -> bool {
        if region.bytes == 0 {
            return true;
        }
        let len = region.padded_bytes() as u64;
        if self.used.get(&region.offset) != Some(&(len, region.number)) {
            return false;
        }
        self.used.remove(&region.offset);
        self.join(region.offset, len);
        true
    }

    /// Whether the region, or what it is a part of, is allocated.
    pub(crate) fn holds(&self, region: &Region) -> bool {
        let around = self.used.range(..=region.offset).next_back();
        let is_its =
            |(offset, (len, number)): (&u64, &(u64, u64))| *number == region.number && region.end() <= offset + len;
        region.bytes == 0 || around.is_some_and(is_its)
    }

    /// The smallest free range of at least `need` bytes. There are few: what is freed together is joined.
    fn fitting(&self, need: u64) -> Option<(u64, u64)> {
        let fits = self.free.iter().filter(|(_, len)| **len >= need);
        fits.min_by_key(|(_, len)| **len).map(|(&offset, &len)| (offset, len))
    }

    fn join(&mut self, offset: u64, len: u64) {
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == offset
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(after_len) = self.free.remove(&end) {
            end += after_len;
        }
        self.free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What a file does: it grows by what is missing.
    fn take(regions: &mut Regions, bytes: usize) -> Region {
        let missing = regions.missing(bytes);
        if missing > 0 {
            regions.grow(missing);
        }
        regions.take(bytes).unwrap()
    }

    proptest! {
        #[test]
        fn regions_never_overlap_and_all_space_comes_back(sizes in prop::collection::vec((0..40_000_usize, any::<bool>()), 1..80)) {
            let mut regions = Regions::new(4096);
            let mut live: Vec<Region> = Vec::new();
            for (bytes, free_one) in sizes {
                if free_one && !live.is_empty() {
                    let region = live.swap_remove(bytes % live.len());
                    prop_assert!(regions.give(&region));
                    prop_assert!(region.bytes == 0 || !regions.give(&region));
                }
                let region = take(&mut regions, bytes);
                prop_assert!(live.iter().all(|other| !other.overlaps(&region) || region.bytes == 0 || other.bytes == 0));
                prop_assert!(regions.holds(&region) && region.end() <= regions.end());
                live.push(region);
            }
            for region in live {
                prop_assert!(regions.give(&region));
            }
            prop_assert_eq!(regions.free_bytes(), regions.end());
            prop_assert!(regions.free.len() <= 1);
        }
    }

    #[test]
    fn a_freed_range_is_used_again_before_the_file_grows() {
        let mut regions = Regions::new(4096);
        let first = take(&mut regions, 10_000);
        let _wall = take(&mut regions, 1);
        assert!(regions.give(&first));
        assert_eq!(take(&mut regions, 12_288).offset(), first.offset());
        assert_eq!(regions.end(), 16_384);
    }

    #[test]
    fn parts_cover_the_region() {
        let mut regions = Regions::new(4096);
        let region = take(&mut regions, 20_001);
        let parts: Vec<Region> = region.parts(10_000).collect();
        assert_eq!(parts.iter().map(Region::bytes).collect::<Vec<_>>(), [8192, 8192, 3617]);
        assert!(parts.iter().all(|part| regions.holds(part)) && parts.windows(2).all(|two| !two[0].overlaps(&two[1])));
        assert_eq!(parts[2].end(), region.end());
    }
}
