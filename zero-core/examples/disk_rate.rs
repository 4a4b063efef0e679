//! Compares this engine's disk throughput with that of the simplest I/O loop.
//!
//! ```text
//! cargo run --release -p zero-core --example disk_rate -- FOLDER [ROUNDS [GIB [BLOCK_KIB [DEPTH [threads]]]]]
//! ```
//!
//! Each round measures, one after the other on the same disk:
//!
//! 1. the simplest loop that keeps `DEPTH` blocks in flight (like fio): writing, reading, and copying each block onto itself;
//! 2. this engine, writing and reading sub-groups of 32 MiB;
//! 3. the pipeline that reads, updates by Adam and writes back every sub-group, with and without overlap;
//! 4. the same with so many updates per sub-group that they take about as long as the disk.
//!
//! The last lines are ratios within a round, and their medians.

use std::error::Error;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use zero_core::offload::{
    Access, AioOptions, BufferPool, DiskError, EngineChoice, Item, Part, PendingTransfer, PipelineOptions, PoolOptions,
    Region, SwapBuffer, SwapDir, SwapFile, SwapFileOptions, pipeline,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const SUB_GROUP: usize = 32 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// The simplest loop's operation on each block.
#[derive(Clone, Copy, PartialEq)]
enum Raw {
    Write,
    Read,
    Copy,
}

/// Moves `blocks` blocks with `buffers.len()` in flight, and returns the seconds. Each slot cycles through its buffer's blocks.
fn raw(
    ring: &mut IoUring,
    file: &File,
    buffers: &mut [SwapBuffer],
    block: usize,
    blocks: usize,
    what: Raw,
) -> Outcome<f64> {
    let fd = types::Fd(file.as_raw_fd());
    let depth = buffers.len();
    // For each buffer: its block, and whether it is being read.
    let mut slots = vec![(0_usize, false); buffers.len()];
    let (mut next, mut done) = (0, 0);
    let mut push = |ring: &mut IoUring, slot: usize, at: usize, read: bool| -> Outcome<()> {
        let round = buffers[slot].len() / block;
        let place = at / depth % round * block;
        let (pointer, offset) = (buffers[slot].bytes_mut()[place..].as_mut_ptr(), (at * block) as u64);
        let entry = match read {
            true => opcode::Read::new(fd, pointer, block as u32).offset(offset).build(),
            false => opcode::Write::new(fd, pointer, block as u32).offset(offset).build(),
        };
        // SAFETY: the caller keeps the buffers until `done` says that all have ended; after an error the program ends.
        unsafe { ring.submission().push(&entry.user_data(slot as u64)) }?;
        Ok(())
    };
    let start = Instant::now();
    for (slot, entry) in slots.iter_mut().enumerate().take(blocks) {
        *entry = (next, what != Raw::Write);
        push(ring, slot, next, entry.1)?;
        next += 1;
    }
    while done < blocks {
        ring.submit_and_wait(1)?;
        loop {
            let Some(answer) = ring.completion().next() else { break };
            let slot = answer.user_data() as usize;
            if answer.result() != block as i32 {
                return Err(format!("block {} ended with {}", slots[slot].0, answer.result()).into());
            }
            if slots[slot].1 && what == Raw::Copy {
                slots[slot].1 = false;
                push(ring, slot, slots[slot].0, false)?;
                continue;
            }
            done += 1;
            if next < blocks {
                slots[slot] = (next, what != Raw::Write);
                push(ring, slot, next, slots[slot].1)?;
                next += 1;
            }
        }
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Moves every region once, with as many in flight as the pool has buffers, and returns the seconds.
fn through_engine(file: &SwapFile, pool: &BufferPool, regions: &[Region], write: bool) -> Result<f64, DiskError> {
    let mut flying = std::collections::VecDeque::<PendingTransfer>::new();
    let start = Instant::now();
    for region in regions {
        if flying.len() == pool.count() {
            flying.pop_front().expect("not empty").wait(LIMIT)?;
        }
        let buffer = pool.take(LIMIT)?;
        flying.push_back(if write { file.write(*region, buffer)? } else { file.read(*region, buffer)? });
    }
    for ticket in flying {
        ticket.wait(LIMIT)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Runs a step of Adam on a sub-group: parameters, two moments and gradients, a quarter of the buffer each.
fn adam(buffer: &mut SwapBuffer) {
    let values = buffer.view_mut::<f32>();
    let (parameters, rest) = values.split_at_mut(values.len() / 4);
    let (first, rest) = rest.split_at_mut(parameters.len());
    let (second, gradients) = rest.split_at_mut(parameters.len());
    for (((p, m), v), g) in parameters.iter_mut().zip(first).zip(second).zip(gradients) {
        *m = 0.9 * *m + 0.1 * *g;
        *v = 0.999 * *v + 0.001 * *g * *g;
        *p -= 1e-3 * *m / (v.sqrt() + 1e-8);
    }
}

fn peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |place: usize, default: usize| arguments.get(place).map_or(Ok(default), |text| text.parse::<usize>());
    let folder = arguments.first().ok_or("usage: disk_rate FOLDER [ROUNDS [GIB [BLOCK_KIB [DEPTH [threads]]]]]")?;
    let (rounds, gib, block, depth) = (number(1, 3)?, number(2, 2)?, number(3, 1024)? << 10, number(4, 8)?);
    let bytes = gib << 30;
    let dir = SwapDir::open(Path::new(folder))?;
    dir.require(2 * bytes as u64)?;
    let aio = AioOptions { block_size: block, queue_depth: depth, ..AioOptions::default() };
    let threads = arguments.get(5).is_some_and(|engine| engine == "threads");
    let engine = if threads { EngineChoice::Threads } else { EngineChoice::Auto };
    let file = dir.create_file(0, &SwapFileOptions { aio, engine, ..SwapFileOptions::default() })?;
    file.require(bytes as u64)?;
    let regions = (0..bytes / SUB_GROUP).map(|_| file.alloc(SUB_GROUP)).collect::<Result<Vec<_>, _>>()?;
    let pool = BufferPool::new(&PoolOptions { count: 4, bytes: SUB_GROUP, ..PoolOptions::default() })?;
    // The simplest loop gets as much memory as the engine: with little, it would stay in the CPU's cache.
    let raw_bytes = (4 * SUB_GROUP / depth).max(block) / block * block;
    let raw_pool = BufferPool::new(&PoolOptions { count: depth, bytes: raw_bytes, ..PoolOptions::default() })?;
    let mut raw_buffers = raw_pool.take_many(depth, LIMIT)?;
    let small_pool = BufferPool::new(&PoolOptions { count: depth, bytes: block, ..PoolOptions::default() })?;
    let mut small_buffers = small_pool.take_many(depth, LIMIT)?;
    let raw_path = dir.path().join("raw");
    let raw_file =
        OpenOptions::new().read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT).open(&raw_path)?;
    rustix::fs::fallocate(&raw_file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64)?;
    let mut ring = IoUring::new(depth as u32)?;
    let mut loop_over =
        |buffers: &mut [SwapBuffer], what| raw(&mut ring, &raw_file, buffers, block, bytes / block, what);
    println!("{gib} GiB in sub-groups of 32 MiB, blocks of {} KiB, {depth} in flight; {file:?}", block >> 10);
    // The first write of a block is slower: the space is allocated, but the file system must mark it as used.
    let (raw_first, engine_first) =
        (loop_over(&mut raw_buffers, Raw::Write)?, through_engine(&file, &pool, &regions, true)?);
    let rate = |seconds: f64| bytes as f64 / 1e9 / seconds;
    println!("first write, GB/s: simple {:.2}, engine {:.2}", rate(raw_first), rate(engine_first));
    let items: Vec<Item> =
        regions.iter().map(|region| Item { parts: vec![Part { region: *region, access: Access::Update }] }).collect();
    let mut ratios = [const { Vec::<f64>::new() }; 6];
    for round in 1..=rounds {
        let (raw_write, engine_write) =
            (loop_over(&mut raw_buffers, Raw::Write)?, through_engine(&file, &pool, &regions, true)?);
        let (raw_read, engine_read) =
            (loop_over(&mut raw_buffers, Raw::Read)?, through_engine(&file, &pool, &regions, false)?);
        let (small_write, small_read) =
            (loop_over(&mut small_buffers, Raw::Write)?, loop_over(&mut small_buffers, Raw::Read)?);
        let raw_copy = loop_over(&mut raw_buffers, Raw::Copy)?;
        let run = |overlap: bool, updates: usize| {
            let options = PipelineOptions { pipeline_read: overlap, pipeline_write: overlap, limit: LIMIT };
            let step = |_: usize, buffers: &mut [SwapBuffer]| {
                (0..updates).for_each(|_| adam(&mut buffers[0]));
                Ok::<(), DiskError>(())
            };
            pipeline(&file, &pool, &items, &options, step)
        };
        let (overlapped, plain) = (run(true, 1)?, run(false, 1)?);
        let (both, alone) = (overlapped.elapsed.as_secs_f64(), plain.elapsed.as_secs_f64());
        let updates = (raw_copy / plain.computing.as_secs_f64()).round().max(1.0) as usize;
        let (heavy, heavy_plain) = (run(true, updates)?, run(false, updates)?);
        println!(
            "round {round}, GB/s: write simple {:.2} (in cache {:.2}) engine {:.2}; read simple {:.2} ({:.2}) engine {:.2}; read and written: simple \
             {:.2}, pipeline {:.2}, without overlap {:.2}",
            rate(raw_write),
            rate(small_write),
            rate(engine_write),
            rate(raw_read),
            rate(small_read),
            rate(engine_read),
            2.0 * rate(raw_copy),
            2.0 * rate(both),
            2.0 * rate(alone)
        );
        println!("  pipeline {overlapped:.2?}\n  without overlap {plain:.2?}");
        println!("  {updates} updates each: pipeline {heavy:.2?}\n  without overlap {heavy_plain:.2?}");
        // The lower bound for any program: the disk's part or the computation's, whichever is longer.
        let floor = raw_copy.max(heavy_plain.computing.as_secs_f64());
        let (heavy, heavy_plain) = (heavy.elapsed.as_secs_f64(), heavy_plain.elapsed.as_secs_f64());
        let values = [
            raw_write / engine_write,
            raw_read / engine_read,
            raw_copy / both,
            alone / both,
            floor / heavy,
            heavy_plain / heavy,
        ];
        ratios.iter_mut().zip(values).for_each(|(list, value)| list.push(value));
    }
    let names = [
        "engine / simple, write",
        "engine / simple, read",
        "pipeline with Adam / simple copy",
        "pipeline / pipeline without overlap",
        "many updates: pipeline / max(simple copy, compute)",
        "many updates: pipeline / pipeline without overlap",
    ];
    for (name, values) in names.iter().zip(ratios) {
        let all: Vec<String> = values.iter().map(|value| format!("{value:.2}")).collect();
        println!("{name}: median {:.2} of {}", median(values), all.join(" "));
    }
    println!(
        "peak memory {:.0} MiB, of which buffers {} MiB",
        peak_mib(),
        (4 * SUB_GROUP + depth * (raw_bytes + block)) >> 20
    );
    Ok(())
}
