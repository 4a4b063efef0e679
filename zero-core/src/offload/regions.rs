//! Allocation of the bytes of a swap file.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Numbers the allocations of all files of the process, so that a region belongs to one file and one allocation.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An allocated range of a swap file: `bytes` bytes at `offset`, padded on the disk to the alignment, so that any length can be
/// transferred. A copy of a freed region, or a region of another file, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    offset: u64,
    bytes: usize,
    alignment: usize,
    /// Number of the allocation that it belongs to.
    number: u64,
}

impl Region {
    /// Returns the offset in the file, a multiple of the file's alignment.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the number of requested bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of bytes used on the disk, which a transfer moves.
    pub fn padded_bytes(&self) -> usize {
        self.bytes.next_multiple_of(self.alignment)
    }

    /// Splits the region into parts of at most `part_bytes`, rounded down to the alignment, for buffers smaller than the region. A part is
    /// used like a region; only the full region can be freed.
    ///
    /// # Panics
    /// If `part_bytes` is less than the alignment.
    pub fn parts(&self, part_bytes: usize) -> impl Iterator<Item = Region> + use<> {
        let region = *self;
        let step = part_bytes / region.alignment * region.alignment;
        assert!(step > 0, "parts of {part_bytes} bytes are smaller than the alignment of {} bytes", region.alignment);
        (0..region.bytes).step_by(step).map(move |start| Region {
            offset: region.offset + start as u64,
            bytes: step.min(region.bytes - start),
            alignment: region.alignment,
            number: region.number,
        })
    }

    /// Returns the offset after the last byte on the disk.
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.padded_bytes() as u64
    }

    /// Returns whether the two share a byte on the disk.
    pub(crate) fn overlaps(&self, other: &Region) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// The free and the allocated ranges of a file. Adjacent free ranges are merged.
pub(crate) struct Regions {
    alignment: usize,
    /// Size of each free range, by offset.
    free: BTreeMap<u64, u64>,
    /// Size and number of each allocated range, by offset.
    used: BTreeMap<u64, (u64, u64)>,
    /// Size of the file that is available for allocation.
    end: u64,
}

impl Regions {
    pub(crate) fn new(alignment: usize) -> Self {
        Self { alignment, free: BTreeMap::new(), used: BTreeMap::new(), end: 0 }
    }

    /// Returns the bytes of the file that are or can be allocated.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Returns the bytes that are not allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Returns the growth of the file that a region of `bytes` needs.
    pub(crate) fn missing(&self, bytes: usize) -> u64 {
        let need = bytes.next_multiple_of(self.alignment) as u64;
        if self.fitting(need).is_some() {
            return 0;
        }
        // A free range at the end is merged with the growth.
        let last = self.free.last_key_value().filter(|(offset, len)| **offset + **len == self.end);
        need - last.map_or(0, |(_, len)| *len)
    }

    /// Records that the file has grown by `bytes`, a multiple of the alignment.
    pub(crate) fn grow(&mut self, bytes: u64) {
        let start = self.end;
        self.end += bytes;
        self.join(start, bytes);
    }

    /// Allocates from the smallest free range that fits, at the lowest offset among equals.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<Region> {
        let alignment = self.alignment;
        // Relaxed: numbers need only be distinct.
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

    /// Frees a region that `take` returned; returns `false` if it is not allocated.
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

    /// Returns whether the region, or the region that it is a part of, is allocated.
    pub(crate) fn holds(&self, region: &Region) -> bool {
        let around = self.used.range(..=region.offset).next_back();
        let is_its =
            |(offset, (len, number)): (&u64, &(u64, u64))| *number == region.number && region.end() <= offset + len;
        region.bytes == 0 || around.is_some_and(is_its)
    }

    /// Returns the smallest free range of at least `need` bytes. There are few: adjacent free ranges are merged.
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

    /// Allocates as a file does: it grows by the missing bytes.
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
