//! The page keeper as an object next to the test's own allocator: placement, contents and counters.

use std::alloc::{GlobalAlloc, Layout, System};

use zero_core::alloc::{MAX_ALIGN, PageKeeper, Settings, THRESHOLD};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 64).unwrap()
}

fn alloc(keeper: &PageKeeper, size: usize) -> *mut u8 {
    // SAFETY: no test asks for zero bytes.
    let block = unsafe { keeper.alloc(layout(size)) };
    assert!(!block.is_null());
    block
}

fn fill(block: *mut u8, size: usize, byte: u8) {
    // SAFETY: each test passes a live block of this size.
    unsafe { block.write_bytes(byte, size) };
}

fn bytes<'a>(block: *const u8, size: usize) -> &'a [u8] {
    // SAFETY: each test passes a live, filled block, and drops the slice before it frees the block.
    unsafe { std::slice::from_raw_parts(block, size) }
}

fn free(keeper: &PageKeeper, block: *mut u8, size: usize) {
    // SAFETY: each test frees a block once, with the size that it has then.
    unsafe { keeper.dealloc(block, layout(size)) };
}

fn resize(keeper: &PageKeeper, block: *mut u8, old: usize, new: usize) -> *mut u8 {
    // SAFETY: as `free`; the tests go on with the returned block.
    let block = unsafe { keeper.realloc(block, layout(old), new) };
    assert!(!block.is_null());
    block
}

#[test]
fn small_requests_are_passed_on() {
    let keeper = PageKeeper::new(System);
    let block = alloc(&keeper, THRESHOLD - 1);
    assert_eq!(keeper.stats(), Default::default());
    free(&keeper, block, THRESHOLD - 1);
}

#[test]
fn zeroed_is_zero_when_fresh_when_reused_and_when_both() {
    let keeper = PageKeeper::new(System);
    let zeroed = |size| {
        // SAFETY: the size is not zero.
        let block = unsafe { keeper.alloc_zeroed(layout(size)) };
        assert!(bytes(block, size).iter().all(|&byte| byte == 0), "{size} bytes");
        block
    };
    for size in [MIB, MIB, MIB / 2, 5 * MIB + 3, 5 * MIB + 4097] {
        let block = zeroed(size);
        fill(block, size, 0xAB);
        free(&keeper, block, size);
    }
    assert!(keeper.trim() >= 5 * MIB);
    free(&keeper, zeroed(6 * MIB), 6 * MIB);
}

#[test]
fn alignments_are_kept_beyond_what_is_served_too() {
    let keeper = PageKeeper::new(System);
    let mut blocks = Vec::new();
    for shift in 0..=23 {
        let layout = Layout::from_size_align(300 * KIB + shift, 1 << shift).unwrap();
        // SAFETY: the size is not zero.
        let block = unsafe { keeper.alloc_zeroed(layout) };
        assert_eq!(block.addr() % layout.align(), 0);
        fill(block, layout.size(), shift as u8);
        blocks.push((block, layout));
    }
    const { assert!(1 << 23 > MAX_ALIGN) };
    for (block, layout) in blocks {
        assert!(bytes(block, layout.size()).iter().all(|&byte| usize::from(byte) == layout.align().ilog2() as usize));
        // SAFETY: each block is freed once, with its layout.
        unsafe { keeper.dealloc(block, layout) };
    }
    assert_eq!(keeper.stats().live_bytes, 0);
}

#[test]
fn power_of_two_buffers_start_at_different_pages() {
    let keeper = PageKeeper::new(System);
    let starts: std::collections::HashSet<usize> = (0..16).map(|_| alloc(&keeper, MIB).addr() % (64 * KIB)).collect();
    assert_eq!(starts.len(), 16);
}

#[test]
fn realloc_grows_into_the_free_neighbour_and_shrinks_in_place() {
    let keeper = PageKeeper::new(System);
    let block = alloc(&keeper, MIB);
    fill(block, MIB, 7);
    let grown = resize(&keeper, block, MIB, 3 * MIB);
    assert_eq!(grown, block);
    fill(block, 3 * MIB, 7);
    let wall = alloc(&keeper, MIB);
    let moved = resize(&keeper, block, 3 * MIB, 4 * MIB);
    assert_ne!(moved, block);
    assert!(bytes(moved, 3 * MIB).iter().all(|&byte| byte == 7));
    assert_eq!(resize(&keeper, moved, 4 * MIB, MIB), moved);
    let small = resize(&keeper, moved, MIB, 100);
    assert!(bytes(small, 100).iter().all(|&byte| byte == 7));
    let large = resize(&keeper, small, 100, MIB);
    assert!(bytes(large, 100).iter().all(|&byte| byte == 7));
    free(&keeper, large, MIB);
    free(&keeper, wall, MIB);
    assert_eq!(keeper.stats().live_bytes, 0);
    assert_eq!(keeper.stats().kept_bytes, keeper.stats().fresh_bytes);
}

#[test]
fn blocks_freed_out_of_order_are_one_block_again() {
    let keeper = PageKeeper::new(System);
    let blocks: Vec<_> = (0..64).map(|_| alloc(&keeper, MIB)).collect();
    let fresh = keeper.stats().fresh_bytes;
    for parity in [1, 0] {
        blocks.iter().enumerate().filter(|(index, _)| index % 2 == parity).for_each(|(_, block)| {
            free(&keeper, *block, MIB);
        });
    }
    let whole = alloc(&keeper, 64 * MIB);
    assert_eq!(keeper.stats().fresh_bytes, fresh);
    assert_eq!(keeper.stats().reused_blocks, 1);
    free(&keeper, whole, 64 * MIB);
}

#[test]
fn training_steps_after_the_second_take_no_fresh_page() {
    let keeper = PageKeeper::new(System);
    let sizes = [(154 * MIB, 3), (50 * MIB, 4), (9 * MIB, 48), (3 * MIB, 100), (800 * KIB, 300), (100 * KIB, 200)];
    let mut state = Vec::new();
    let mut after_second = 0;
    for step in 0..52 {
        // Forward keeps, backward frees in reverse and allocates gradients; the first step leaves optimizer state.
        let mut live: Vec<(*mut u8, usize)> = Vec::new();
        let mut sum = 0;
        for round in 0..100 {
            for (size, count) in sizes {
                for _ in (count * round / 100)..(count * (round + 1) / 100) {
                    live.push((alloc(&keeper, size), size));
                    let transient = alloc(&keeper, size / 2 + 64 * KIB);
                    free(&keeper, transient, size / 2 + 64 * KIB);
                    sum += size;
                }
            }
        }
        if step == 0 {
            state.extend((0..100).map(|_| alloc(&keeper, 3 * MIB)));
        }
        let mut gradients = Vec::new();
        while let Some((block, size)) = live.pop() {
            let gradient = alloc(&keeper, size / 4 + 64 * KIB);
            gradients.push((gradient, size / 4 + 64 * KIB));
            free(&keeper, block, size);
        }
        gradients.into_iter().for_each(|(block, size)| free(&keeper, block, size));
        assert!(sum > 1600 * MIB);
        if step == 1 {
            after_second = keeper.stats().fresh_bytes;
        }
    }
    let stats = keeper.stats();
    assert_eq!(stats.fresh_bytes, after_second);
    // What fragmentation costs: pages ever used against the most that was live at once.
    let ratio = stats.fresh_bytes as f64 / stats.live_bytes_peak as f64;
    println!("pages used / peak of live bytes: {ratio:.4}");
    assert!(ratio < 1.1, "{ratio}");
    assert_eq!(stats.live_bytes + stats.kept_bytes, stats.fresh_bytes);
}

#[test]
fn what_exceeds_the_limit_is_given_back_at_once() {
    let keeper = PageKeeper::with_settings(System, Settings { keep_bytes: 3 * MIB as u64, ..Settings::DEFAULT });
    let blocks: Vec<_> = (0..8).map(|_| alloc(&keeper, MIB)).collect();
    blocks.iter().for_each(|block| fill(*block, MIB, 1));
    blocks.into_iter().for_each(|block| free(&keeper, block, MIB));
    let kept = keeper.stats().kept_bytes as usize;
    assert!((2 * MIB..=3 * MIB).contains(&kept), "{kept}");
    // SAFETY: the size is not zero.
    let block = unsafe { keeper.alloc_zeroed(layout(8 * MIB)) };
    assert!(bytes(block, 8 * MIB).iter().all(|&byte| byte == 0));
    assert_eq!(keeper.stats().kept_bytes, 0);
    free(&keeper, block, 8 * MIB);
}

#[test]
fn an_impossible_request_is_null_and_the_next_one_is_served() {
    let keeper = PageKeeper::new(System);
    // SAFETY: the size is not zero.
    assert!(unsafe { keeper.alloc(layout(isize::MAX as usize - 63)) }.is_null());
    free(&keeper, alloc(&keeper, MIB), MIB);
}
