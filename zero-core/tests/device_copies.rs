//! Copies between the host and a GPU: `cargo test -p zero-core --features nccl --test device_copies`. Needs no GPU: the
//! driver is a software stand-in (`tests/cuda_shim`), in which unordered work really runs at different times.
//!
//! Each test starts this binary again with that driver in its library path; there the test `rank` runs the case.

#[allow(dead_code)] // What else the tests of the nccl engine need.
mod nccl_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nccl_common::{Compute, Memory, Shim, launch, note, rank_of};
use zero_core::collective::DType;
use zero_core::copies::{Copies, CopyError};

const PATIENT: Duration = Duration::from_secs(25);

/// Runs a case. Without a case's environment variables it does nothing.
#[test]
fn rank() {
    let Some((name, folder)) = rank_of() else { return };
    let outcome = match name.as_str() {
        "there and back" => there_and_back(),
        "order" => order(),
        "before" => before(),
        "deadline" => deadline(),
        "blocks" => blocks(),
        _ => Copies::open(0, PATIENT).map(drop),
    };
    note(&folder, 0, &outcome.map_or_else(|error| error.to_string(), |()| "ok".into()));
}

fn there_and_back() -> Result<(), CopyError> {
    let copies = Copies::open(0, PATIENT)?;
    for len in [1, 1000, 300_000] {
        let values: Vec<f64> = (0..len).map(|i| (i % 251) as f64).collect();
        let (from, to) = (Memory::of(&values, DType::F32), Memory::new(len, DType::F32));
        // SAFETY: memory of as many bytes, which nobody else uses.
        let here = unsafe { copies.download(from.0.pointer, copies.alloc(4 * len)?) }?;
        // SAFETY: as above.
        unsafe { copies.upload(&here, to.0.pointer) }?;
        assert_eq!(to.read(), values);
        let to = Memory::new(len, DType::F32);
        let ordinary = here.to_vec();
        // SAFETY: as above.
        unsafe { copies.upload(&ordinary, to.0.pointer) }?;
        assert_eq!(to.read(), values, "from memory that is not page-locked");
    }
    Ok(())
}

/// A copy waits for work submitted before it, and not for work submitted later.
fn order() -> Result<(), CopyError> {
    let copies = Copies::open(0, PATIENT)?;
    let compute = Compute::new(0);
    let memory = Memory::of(&[1.0], DType::F32);
    let address = memory.0.pointer as usize;
    compute.run(move || {
        std::thread::sleep(Duration::from_millis(200));
        // SAFETY: the memory outlives the kernel, and nothing else runs on it now.
        unsafe { (address as *mut f32).write(2.0) };
    });
    let (go, left) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (kernel_goes, kernel_left) = (go.clone(), left.clone());
    let address = memory.0.pointer;
    let copier = std::thread::spawn(move || {
        // SAFETY: the kernel that is given later uses none of it, and the memory outlives the copy.
        unsafe { copies.download(address, copies.alloc(4)?) }
    });
    // After the copy has been asked for, and before it can begin.
    std::thread::sleep(Duration::from_millis(100));
    compute.run(move || {
        while !kernel_goes.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        kernel_left.store(true, Ordering::Release);
    });
    let here = copier.join().unwrap()?;
    assert_eq!(here[..], 2.0_f32.to_ne_bytes(), "after the kernel that writes it");
    assert!(!left.load(Ordering::Acquire), "beside a kernel that was given later");
    go.store(true, Ordering::Release);
    compute.synchronize();
    Ok(())
}

/// A copy that nobody waits for: work submitted later runs after it, and its source is kept.
fn before() -> Result<(), CopyError> {
    let copies = Copies::open(0, PATIENT)?;
    let compute = Compute::new(0);
    let memory = Memory::of(&[1.0], DType::F32);
    let address = memory.0.pointer as usize;
    let (go, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (kernel_goes, kernel_saw) = (go.clone(), seen.clone());
    compute.run(move || {
        while !kernel_goes.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
    });
    let mut source = copies.alloc(4)?;
    source.copy_from_slice(&3.0_f32.to_ne_bytes());
    // SAFETY: the memory is kept until the device has done all.
    unsafe { copies.upload_before(Arc::new(source), memory.0.pointer) }?;
    // The first kernel still runs: nothing was waited for.
    compute.run(move || {
        // SAFETY: the memory outlives the kernel, which comes after the copy.
        kernel_saw.store(unsafe { (address as *const f32).read() } == 3.0, Ordering::Release);
    });
    go.store(true, Ordering::Release);
    compute.synchronize();
    assert!(seen.load(Ordering::Acquire));
    Ok(())
}

fn deadline() -> Result<(), CopyError> {
    let copies = Copies::open(0, Duration::from_millis(150))?;
    let compute = Compute::new(0);
    compute.run(|| std::thread::sleep(Duration::from_millis(600)));
    let memory = Memory::of(&[1.0], DType::F32);
    let begin = Instant::now();
    // SAFETY: the memory is kept until the device has done all.
    let error = unsafe { copies.download(memory.0.pointer, copies.alloc(4)?) }.unwrap_err();
    assert!(begin.elapsed() < Duration::from_millis(500), "{:?}", begin.elapsed());
    compute.synchronize();
    std::thread::sleep(Duration::from_millis(100));
    Err(error)
}

/// Blocks are reused for requests of about the same size.
fn blocks() -> Result<(), CopyError> {
    let copies = Copies::open(0, PATIENT)?;
    let first = copies.alloc(1_000_000)?;
    let (address, capacity) = (first.as_ptr(), first.len());
    assert_eq!(capacity, 1_000_000);
    let second = copies.alloc(1_000_000)?;
    assert_ne!(second.as_ptr(), address);
    drop(first);
    assert_ne!(copies.alloc(100_000)?.as_ptr(), address, "much smaller");
    let third = copies.alloc(990_000)?;
    assert_eq!((third.as_ptr(), third.len()), (address, 990_000));
    let error = copies.alloc(4_000_000).unwrap_err().to_string();
    assert!(
        error.starts_with("page-locked memory on GPU 0: cuMemHostAlloc") && error.contains("offload less"),
        "{error}"
    );
    drop((second, third));
    drop(copies);
    // All of it was given back.
    Copies::open(0, PATIENT)?.alloc(3_000_000).map(drop)
}

fn case(name: &str, shim: Shim, more: &[(&'static str, &str)]) -> String {
    let launched = launch(name, 1, shim, |_| more.iter().map(|&(key, value)| (key, value.to_string())).collect());
    launched.note(0).to_string()
}

#[test]
fn bytes_go_there_and_back() {
    assert_eq!(case("there and back", Shim::Full, &[]), "ok");
}

#[test]
fn a_copy_comes_after_what_was_given_before_and_beside_what_follows() {
    assert_eq!(case("order", Shim::Full, &[]), "ok");
}

#[test]
fn what_is_given_later_comes_after_a_copy_that_nobody_waits_for() {
    assert_eq!(case("before", Shim::Full, &[]), "ok");
}

#[test]
fn a_copy_that_does_not_come_is_an_error() {
    let told = case("deadline", Shim::Full, &[]);
    assert!(
        told.starts_with("a copy from the device on GPU 0: not finished after 1") && told.contains("deadline"),
        "{told}"
    );
}

#[test]
fn page_locked_blocks_are_kept_and_given_back() {
    assert_eq!(case("blocks", Shim::Full, &[("SHIM_LOCKABLE", "3300000")]), "ok");
}

#[test]
fn what_is_missing_is_told() {
    let told = case("open", Shim::OldDriver, &[]);
    assert_eq!(
        told,
        "copying on GPU 0: the driver has no cuCtxRecordEvent: update it to the driver of CUDA 12.5 or newer"
    );
    let told = case("open", Shim::Nothing, &[]);
    assert!(told.starts_with("copying on GPU 0: ") && told.contains("libcuda"), "{told}");
    let told = case("open", Shim::Full, &[("SHIM_DEVICES", "0")]);
    assert!(told.starts_with("copying on GPU 0: "), "{told}");
}
