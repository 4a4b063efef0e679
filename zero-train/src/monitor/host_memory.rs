//! This process's memory as Linux tells it. Out: bytes; `None` on other systems, or where `/proc` hides a figure.

use std::fs;

/// Key of the page size in the auxiliary vector (`AT_PAGESZ` of getauxval(3)).
const AT_PAGESZ: usize = 6;

/// Bytes of a page of memory.
pub(super) fn page_bytes() -> Option<u64> {
    const WORD: usize = size_of::<usize>();
    let entries = fs::read("/proc/self/auxv").ok()?;
    entries.chunks_exact(2 * WORD).find_map(|entry| {
        let (key, value) = entry.split_at(WORD);
        let word = |bytes: &[u8]| bytes.try_into().ok().map(usize::from_ne_bytes);
        if word(key)? == AT_PAGESZ { u64::try_from(word(value)?).ok() } else { None }
    })
}

/// Bytes of memory the process holds now (its resident set), from `/proc/self/statm`.
pub(super) fn rss_bytes(page_bytes: u64) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_bytes)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn linux_tells_this_processs_memory() {
        let page = page_bytes().unwrap();
        assert!(page.is_power_of_two() && (4096..=1 << 20).contains(&page), "{page}");
        let rss = rss_bytes(page).unwrap();
        assert!((1 << 18..1 << 34).contains(&rss), "{rss}");
    }
}
