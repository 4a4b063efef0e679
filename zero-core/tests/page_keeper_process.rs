//! The page keeper's effect on its process: memory released by `trim`, and exhausted address space. Each test runs in a
//! child process, since limits and resident sizes apply to the full process.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    env,
    process::Command,
};

use zero_core::alloc::{PageKeeper, THRESHOLD};

const MIB: usize = 1 << 20;
const CHILD: &str = "PAGE_KEEPER_TEST_CHILD";

/// Runs the test of this name again in its own process; returns `true` in that process.
fn in_child(test: &str) -> bool {
    if env::var_os(CHILD).is_some() {
        return true;
    }
    let test_program = env::current_exe().unwrap();
    let output = Command::new(test_program).args(["--exact", test, "--nocapture"]).env(CHILD, "1").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {text}{}", output.status, String::from_utf8_lossy(&output.stderr));
    println!("{text}");
    false
}

fn layout(size: usize) -> Layout {
    Layout::from_size_align(size, 64).unwrap()
}

fn filled(keeper: &PageKeeper, size: usize) -> *mut u8 {
    // SAFETY: the size is not zero, and only a block that was had is filled.
    unsafe {
        let block = keeper.alloc(layout(size));
        if !block.is_null() {
            block.write_bytes(1, size);
        }
        block
    }
}

fn free(keeper: &PageKeeper, block: *mut u8, size: usize) {
    // SAFETY: each block is freed once, with its size.
    unsafe { keeper.dealloc(block, layout(size)) };
}

fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

fn limit_addresses(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the call reads one structure.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

#[test]
fn trim_gives_resident_memory_back_and_leaves_live_blocks() {
    if !in_child("trim_gives_resident_memory_back_and_leaves_live_blocks") {
        return;
    }
    let keeper = PageKeeper::new(System);
    let before = resident_bytes();
    let blocks: Vec<_> = (0..40).map(|_| filled(&keeper, 5 * MIB)).collect();
    assert!(resident_bytes() - before >= 200 * MIB);
    for (index, block) in blocks.iter().enumerate() {
        if index != 20 {
            free(&keeper, *block, 5 * MIB);
        }
    }
    assert!(resident_bytes() - before >= 200 * MIB);
    assert!(keeper.trim() >= 195 * MIB);
    let after = resident_bytes() - before;
    println!("resident after trim: {} KiB", after >> 10);
    assert!(after <= 10 * MIB);
    // SAFETY: the block is live and was filled.
    assert!(unsafe { std::slice::from_raw_parts(blocks[20], 5 * MIB) }.iter().all(|&byte| byte == 1));
    let fresh = keeper.stats().fresh_bytes;
    free(&keeper, filled(&keeper, 5 * MIB), 5 * MIB);
    assert!(keeper.stats().fresh_bytes - fresh >= 5 * MIB as u64);
}

#[test]
fn scarce_addresses_are_shared_out_and_then_refused() {
    if !in_child("scarce_addresses_are_shared_out_and_then_refused") {
        return;
    }
    limit_addresses(1 << 30);
    let keeper = PageKeeper::new(System);
    let mut blocks = Vec::new();
    loop {
        let block = filled(&keeper, MIB);
        if block.is_null() {
            break;
        }
        blocks.push(block);
        assert!(blocks.len() < 1024);
    }
    println!("{} MiB of 1024", blocks.len());
    assert!(blocks.len() > 800, "{} MiB", blocks.len());
    // Still null, not a crash; the small allocator and freed blocks still serve.
    assert!(filled(&keeper, THRESHOLD).is_null() || filled(&keeper, 64 * MIB).is_null());
    let small = filled(&keeper, 1000);
    assert!(!small.is_null());
    free(&keeper, small, 1000);
    let count = blocks.len();
    blocks.into_iter().for_each(|block| free(&keeper, block, MIB));
    let again: Vec<_> = (0..count).map(|_| filled(&keeper, MIB)).collect();
    assert!(again.iter().all(|block| !block.is_null()));
}

#[test]
fn a_request_gets_an_arena_of_its_own_where_nothing_else_fits() {
    if !in_child("a_request_gets_an_arena_of_its_own_where_nothing_else_fits") {
        return;
    }
    // Room for far less than the smallest of the usual arenas.
    let pages: u64 = std::fs::read_to_string("/proc/self/statm").unwrap().split(' ').next().unwrap().parse().unwrap();
    limit_addresses(pages * 4096 + (24 << 20));
    let keeper = PageKeeper::new(System);
    let block = filled(&keeper, 10 * MIB);
    assert!(!block.is_null());
    assert!(filled(&keeper, 40 * MIB).is_null());
    free(&keeper, block, 10 * MIB);
}

#[test]
fn no_addresses_at_all_is_null() {
    if !in_child("no_addresses_at_all_is_null") {
        return;
    }
    limit_addresses(0);
    let keeper = PageKeeper::new(System);
    assert!(filled(&keeper, MIB).is_null());
    assert_eq!(keeper.stats(), Default::default());
}
