//! The page keeper as this program's allocator: four threads allocate, resize and free at random, and check every byte
//! pattern. Blocks move between threads, so most are freed by a thread other than their first owner.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::Mutex,
    thread,
};

use zero_core::alloc::PageKeeper;

#[global_allocator]
static ALLOCATOR: PageKeeper = PageKeeper::new(System);

const OPERATIONS_PER_THREAD: usize = 50_000;

struct Block {
    start: *mut u8,
    layout: Layout,
    byte: u8,
}

// SAFETY: a block is owned memory; its bytes are reached through its one owner only.
unsafe impl Send for Block {}

impl Block {
    fn new(layout: Layout, byte: u8, zeroed: bool) -> Self {
        // SAFETY: no layout here is empty.
        let start = unsafe { if zeroed { ALLOCATOR.alloc_zeroed(layout) } else { ALLOCATOR.alloc(layout) } };
        assert!(!start.is_null() && start.addr().is_multiple_of(layout.align()));
        let mut block = Self { start, layout, byte: 0 };
        if zeroed {
            block.check(layout.size());
        }
        block.fill(byte);
        block
    }

    fn fill(&mut self, byte: u8) {
        self.byte = byte;
        // SAFETY: the block is live, has this size and this owner.
        unsafe { self.start.write_bytes(byte, self.layout.size()) };
    }

    fn check(&self, size: usize) {
        // SAFETY: the block is live, filled, and at least this long.
        let bytes = unsafe { std::slice::from_raw_parts(self.start, size) };
        assert!(bytes.iter().all(|&byte| byte == self.byte), "a block of {size} bytes was overwritten");
    }

    fn resize(&mut self, size: usize, byte: u8) {
        // SAFETY: the block is live and `size` is not zero.
        self.start = unsafe { ALLOCATOR.realloc(self.start, self.layout, size) };
        assert!(!self.start.is_null() && self.start.addr().is_multiple_of(self.layout.align()));
        self.check(size.min(self.layout.size()));
        self.layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        self.fill(byte);
    }

    fn free(self) {
        self.check(self.layout.size());
        // SAFETY: the block is live, and gone with this call.
        unsafe { ALLOCATOR.dealloc(self.start, self.layout) };
    }
}

/// Returns a layout of mostly 16 KiB to 256 KiB, rarely up to 4 MiB, aligned to up to 4 MiB.
fn random_layout(random: &mut impl FnMut() -> usize) -> Layout {
    let size = match random() % 64 {
        0 => 1 + random() % (4 << 20),
        _ => (16 << 10) + random() % (240 << 10),
    };
    let align = match random() % 64 {
        0 => 1 << (random() % 23),
        _ => 1 << (random() % 8),
    };
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn four_threads_keep_their_patterns() {
    let shared: Mutex<Vec<Block>> = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for index in 0..4_u64 {
            let shared = &shared;
            scope.spawn(move || {
                let mut seed = index + 1;
                let mut random = move || {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (seed >> 33) as usize
                };
                for _ in 0..OPERATIONS_PER_THREAD {
                    let taken = {
                        let mut blocks = shared.lock().unwrap();
                        let at = random() % (blocks.len() + 1);
                        if at < blocks.len() && (blocks.len() > 200 || random() % 2 == 0) {
                            Some(blocks.swap_remove(at))
                        } else {
                            None
                        }
                    };
                    let byte = random() as u8;
                    let kept = match taken {
                        None => Block::new(random_layout(&mut random), byte, random() % 4 == 0),
                        Some(mut block) if random() % 3 == 0 => {
                            block.resize(random_layout(&mut random).size(), byte);
                            block
                        }
                        Some(block) => {
                            block.free();
                            continue;
                        }
                    };
                    shared.lock().unwrap().push(kept);
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..20 {
                thread::sleep(std::time::Duration::from_millis(100));
                ALLOCATOR.trim();
            }
        });
    });
    shared.into_inner().unwrap().into_iter().for_each(Block::free);
    let stats = ALLOCATOR.stats();
    println!("{stats:?}");
    assert_eq!(stats.live_bytes, 0, "the test's own lists are below the threshold");
    assert_eq!(ALLOCATOR.trim() as u64, stats.kept_bytes);
    assert_eq!(ALLOCATOR.stats().kept_bytes, 0);
}
