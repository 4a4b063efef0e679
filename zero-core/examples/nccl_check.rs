//! Checks whether the `nccl` engine works on this machine: results, order, throughput and the deadline for a missing rank,
//! as well as copies between host and device.
//!
//! ```text
//! cargo run --release -p zero-core --features nccl --example nccl_check -- [MIB [DEADLINE_SECONDS]]
//! torchrun --no-python --nproc-per-node 8 target/release/examples/nccl_check 256
//! ```
//!
//! Without torchrun's environment it runs one rank, on device 0. Rank 0 prints a line for each check. Exit codes:
//!
//! * 0: all checks passed;
//! * 1: a check failed;
//! * 2: the setup must be changed;
//! * 75: another rank failed.

#[path = "../tests/nccl_common/numbers.rs"]
mod numbers;

use std::ffi::c_void;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use numbers::{bytes_of, numbers_of, reduced, values};
use zero_core::collective::DType;
use zero_core::collective::nccl::{
    Compute, DevicePending, DeviceRequest, DeviceSlice, NcclComm, NcclError, NcclOptions,
};
use zero_core::copies::{Copies, CopyError};
use zero_core::{Buffer, CommError, ReduceOp};

/// An unsuccessful end of the check: exit code and message.
struct End(u8, String);

impl From<NcclError> for End {
    fn from(error: NcclError) -> Self {
        End(error.code() as u8, error.to_string())
    }
}

impl From<CommError> for End {
    fn from(error: CommError) -> Self {
        let code = match error {
            CommError::PeerFailed { .. } | CommError::PeerLeft { .. } => 75,
            CommError::Timeout { .. } | CommError::Stalled { .. } => 75,
            _ => 1,
        };
        End(code, error.to_string())
    }
}

fn cuda(call: &str, code: sys::CUresult) -> Result<(), End> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(End(1, format!("{call}: {code:?}"))),
    }
}

/// Device memory, freed when dropped.
struct Memory(DeviceSlice);

impl Memory {
    fn new(len: usize, dtype: DType) -> Result<Self, End> {
        let mut pointer = 0;
        // SAFETY: the pointer is to a local, and the device's context current on this thread.
        cuda("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut pointer, (len * dtype.size()).max(1)) })?;
        Ok(Self(DeviceSlice { pointer, len, dtype }))
    }

    fn of(values: &[f64], dtype: DType) -> Result<Self, End> {
        let memory = Self::new(values.len(), dtype)?;
        let bytes = bytes_of(values, dtype);
        // SAFETY: as many bytes as the memory has.
        let code = unsafe { sys::cuMemcpyHtoD_v2(memory.0.pointer, bytes.as_ptr().cast(), bytes.len()) };
        cuda("cuMemcpyHtoD", code).map(|()| memory)
    }

    fn read(&self) -> Result<Vec<f64>, End> {
        let mut bytes = vec![0_u8; self.0.bytes()];
        // SAFETY: as many bytes as the memory has.
        let code = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), self.0.pointer, bytes.len()) };
        cuda("cuMemcpyDtoH", code)?;
        Ok(numbers_of(&bytes, self.0.dtype))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and no longer in use. A refusal leaves it to the end of the process.
        let _ = unsafe { sys::cuMemFree_v2(self.0.pointer) };
    }
}

/// A stream that does not synchronize with other streams implicitly.
struct Stream(sys::CUstream);

impl Stream {
    fn new() -> Result<Self, End> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: the pointer is to a local, and the device's context current on this thread.
        cuda("cuStreamCreate", unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, 1, 0) })?;
        Ok(Self(stream))
    }

    fn copy(&self, from: DeviceSlice, to: DeviceSlice) -> Result<(), End> {
        // SAFETY: both are alive, of one size, and do not overlap.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to.pointer, from.pointer, from.bytes(), self.0) };
        cuda("cuMemcpyDtoDAsync", code)
    }

    /// Blocks the stream until `open` is set.
    fn hold(&self, open: &Arc<AtomicBool>) -> Result<(), End> {
        unsafe extern "C" fn wait(data: *mut c_void) {
            // SAFETY: the pointer that `hold` made, once.
            let open = unsafe { Arc::from_raw(data.cast::<AtomicBool>()) };
            while !open.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let data = Arc::into_raw(open.clone()).cast_mut().cast();
        // SAFETY: `wait` takes what is passed with it.
        cuda("cuLaunchHostFunc", unsafe { sys::cuLaunchHostFunc(self.0, Some(wait), data) })
    }

    fn synchronize(&self) -> Result<(), End> {
        // SAFETY: the stream is alive.
        cuda("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.0) })
    }
}

/// Describes the first difference between two lists; empty if there is none.
fn apart(got: &[f64], expected: &[f64], dtype: DType) -> String {
    let tolerance = match dtype {
        DType::F64 | DType::U8 => 1e-12,
        DType::F32 => 1e-6,
        DType::F16 => 2e-3,
        DType::Bf16 => 2e-2,
    };
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= tolerance * b.abs().max(1.0);
    if got.len() != expected.len() {
        return format!(": {} elements, expected {}", got.len(), expected.len());
    }
    match got.iter().zip(expected).position(|pair| !near(pair)) {
        Some(at) => format!(": element {at} of {} is {}, expected {}", got.len(), got[at], expected[at]),
        None => String::new(),
    }
}

/// A report of the checks, printed on rank 0, that records whether a check has failed.
struct Report {
    first: bool,
    failed: bool,
}

impl Report {
    fn line(&mut self, comm: &NcclComm, name: &str, good: bool, detail: &str) -> Result<(), End> {
        let mine = Buffer::U8(vec![u8::from(!good)]);
        let bad = comm.control().all_reduce(mine, ReduceOp::Max)?.into_u8()[0] > 0;
        self.failed |= bad;
        if self.first {
            println!("{:<6} {name:<34} {detail}", if bad { "FAILED" } else { "ok" });
        }
        Ok(())
    }
}

/// Submits one collective, ordered after all work of the context.
///
/// # Safety
///
/// Same as [`NcclComm::submit`].
unsafe fn issue(comm: &NcclComm, request: DeviceRequest, what: &str) -> Result<DevicePending, CommError> {
    // SAFETY: the caller's word.
    unsafe { comm.submit(&[request], Compute::Context, what) }
}

fn results(comm: &NcclComm, report: &mut Report) -> Result<(), End> {
    let (rank, world, len) = (comm.rank(), comm.world(), 100_003 / comm.world());
    for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::U8] {
        let name = |op: &str| format!("{op} {}", dtype.name());
        let mine = Memory::of(&values(rank, len), dtype)?;
        let (all, cast) = (Memory::new(len * world, dtype)?, Memory::of(&values(rank, len), dtype)?);
        // SAFETY: memory of this device that is kept until the operation has ended.
        unsafe { issue(comm, DeviceRequest::AllGather { input: mine.0, output: all.0 }, "") }?.wait()?;
        let gathered: Vec<f64> = (0..world).flat_map(|rank| values(rank, len)).collect();
        report.line(comm, &name("all_gather"), all.read()? == gathered, &format!("{len} elements a rank"))?;
        // SAFETY: as above.
        unsafe { issue(comm, DeviceRequest::Broadcast { buffer: cast.0, root: world - 1 }, "") }?.wait()?;
        let good = cast.read()? == values(world - 1, len);
        report.line(comm, &name("broadcast"), good, &format!("from rank {}", world - 1))?;
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            if dtype == DType::U8 && op == ReduceOp::Mean {
                continue;
            }
            let (wide, part) = (Memory::of(&values(rank, len * world), dtype)?, Memory::new(len, dtype)?);
            let whole = Memory::new(len, dtype)?;
            let requests = [
                DeviceRequest::ReduceScatter { input: wide.0, output: part.0, op },
                DeviceRequest::AllReduce { input: mine.0, output: whole.0, op },
            ];
            // SAFETY: as above.
            unsafe { comm.submit(&requests, Compute::Context, "") }?.wait()?;
            let expected = reduced(world, len * world, op);
            let differences = [
                apart(&part.read()?, &expected[rank * len..(rank + 1) * len], dtype),
                apart(&whole.read()?, &reduced(world, len, op), dtype),
            ];
            let detail = format!("{op:?}, one launch{}", differences.concat());
            report.line(comm, &name("reduce_scatter, all_reduce"), differences.concat().is_empty(), &detail)?;
        }
    }
    Ok(())
}

/// Checks the order of a blocked stream's work: a copy into the input of a reduction, the reduction, and a copy of its result.
fn order(comm: &NcclComm, report: &mut Report) -> Result<(), End> {
    let (world, len) = (comm.world(), 1 << 20);
    for explicit in [false, true] {
        let stream = Stream::new()?;
        let filled = Memory::of(&vec![3.0; len], DType::F32)?;
        let (reduced, seen) = (Memory::of(&vec![0.0; len], DType::F32)?, Memory::new(len, DType::F32)?);
        let open = Arc::new(AtomicBool::new(false));
        let on_host = !explicit && !comm.orders_on_device();
        if on_host {
            open.store(true, Ordering::Release);
        }
        stream.hold(&open)?;
        stream.copy(filled.0, reduced.0)?;
        let compute = if explicit { Compute::Stream(stream.0 as u64) } else { Compute::Context };
        let request = DeviceRequest::AllReduce { input: reduced.0, output: reduced.0, op: ReduceOp::Sum };
        // SAFETY: memory of this device that is kept until the stream, which waits for the operation, has ended.
        let ticket = unsafe { comm.submit(&[request], compute, "") }?;
        if explicit {
            // SAFETY: the stream is alive.
            unsafe { ticket.order_stream(stream.0 as u64) }?;
        } else {
            ticket.order_compute()?;
        }
        stream.copy(reduced.0, seen.0)?;
        std::thread::sleep(Duration::from_millis(20));
        let waits = on_host || !ticket.is_done()?;
        open.store(true, Ordering::Release);
        stream.synchronize()?;
        let good = waits && seen.read()? == vec![3.0 * world as f64; len];
        let how = match (explicit, on_host) {
            (true, _) => "by events of a stream",
            (false, false) => "by events of the context, the host does not wait",
            (false, true) => "the host waits: the driver is older than CUDA 12.5",
        };
        report.line(comm, "order among kernels", good, how)?;
        ticket.wait()?;
    }
    Ok(())
}

/// Returns the mean time in seconds of `ROUNDS` runs, after a few warm-up runs.
fn timed(mut run: impl FnMut() -> Result<(), End>) -> Result<f64, End> {
    const ROUNDS: u32 = 20;
    for _ in 0..3 {
        run()?;
    }
    let begin = Instant::now();
    for _ in 0..ROUNDS {
        run()?;
    }
    Ok(begin.elapsed().as_secs_f64() / f64::from(ROUNDS))
}

/// Measures bus bandwidth as defined by nccl-tests, and compares it with a copy on the device.
fn rates(comm: &NcclComm, report: &mut Report, mib: usize) -> Result<(), End> {
    let world = comm.world();
    let len = (mib << 20) / 4 / world;
    let (whole, part) = (Memory::new(len * world, DType::F32)?, Memory::new(len, DType::F32)?);
    let stream = Stream::new()?;
    let other = Memory::new(len * world, DType::F32)?;
    let bytes = whole.0.bytes() as f64;
    let copy = timed(|| stream.copy(whole.0, other.0).and_then(|()| stream.synchronize()))?;
    // Read and written.
    let device = 2.0 * bytes / copy / 1e9;
    report.line(comm, "copy on the device", true, &format!("{mib} MiB, {device:.1} GB/s read and written"))?;
    let share = (world - 1) as f64 / world as f64;
    let cases = [
        ("all_gather", DeviceRequest::AllGather { input: part.0, output: whole.0 }, share),
        ("reduce_scatter", DeviceRequest::ReduceScatter { input: whole.0, output: part.0, op: ReduceOp::Sum }, share),
        ("all_reduce", DeviceRequest::AllReduce { input: whole.0, output: other.0, op: ReduceOp::Sum }, 2.0 * share),
        ("broadcast", DeviceRequest::Broadcast { buffer: whole.0, root: 0 }, if world > 1 { 1.0 } else { 0.0 }),
    ];
    for (name, request, factor) in cases {
        // SAFETY: memory of this device that is kept until the operation has ended.
        let seconds = timed(|| Ok(unsafe { issue(comm, request, "") }?.wait()?))?;
        let (algorithm, bus) = (bytes / seconds / 1e9, factor * bytes / seconds / 1e9);
        let detail = format!(
            "{mib} MiB, {:.3} ms, {algorithm:.1} GB/s, bus {bus:.1} GB/s = {:.2} of the copy",
            seconds * 1e3,
            bus / device
        );
        report.line(comm, &format!("rate of {name}"), true, &detail)?;
    }
    let small = Memory::new(256, DType::F32)?;
    let largest = DeviceRequest::AllReduce { input: small.0, output: small.0, op: ReduceOp::Max };
    let issued = timed(|| {
        // SAFETY: as above; the next one, or the wait below, comes after it.
        unsafe { issue(comm, largest, "") }?.order_compute()?;
        Ok(())
    })?;
    // SAFETY: as above.
    unsafe { issue(comm, largest, "") }?.wait()?;
    // SAFETY: as above.
    let there = timed(|| Ok(unsafe { issue(comm, largest, "") }?.wait()?))?;
    let detail =
        format!("1 KiB, {:.1} us to issue, {:.1} us until the host has seen its end", issued * 1e6, there * 1e6);
    report.line(comm, "latency of all_reduce", true, &detail)
}

/// Checks copies between page-locked host memory and the device: results, order while a stream is blocked, throughput.
fn copies(comm: &NcclComm, report: &mut Report, mib: usize) -> Result<(), End> {
    let copies = match Copies::open(comm.device(), Duration::from_secs(5)) {
        Ok(copies) => copies,
        Err(error) => {
            return report.line(comm, "copies to and from the host", !comm.orders_on_device(), &error.to_string());
        }
    };
    let failed = |error: CopyError| End(1, error.to_string());
    let bytes = mib << 20;
    let values = values(comm.rank(), bytes / 4);
    let (from, to) = (Memory::of(&values, DType::F32)?, Memory::new(bytes / 4, DType::F32)?);
    // SAFETY: memory of as many bytes, which nobody else uses.
    let here = unsafe { copies.download(from.0.pointer, copies.alloc(bytes).map_err(failed)?) }.map_err(failed)?;
    // SAFETY: as above.
    unsafe { copies.upload(&here, to.0.pointer) }.map_err(failed)?;
    report.line(comm, "copies to and from the host", to.read()? == values, &format!("{mib} MiB there and back"))?;

    // Given after a copy that nobody waits for, and beside one that is waited for.
    let (stream, seen) = (Stream::new()?, Memory::new(bytes / 4, DType::F32)?);
    let target = Memory::new(bytes / 4, DType::F32)?;
    let source = Arc::new(here);
    // SAFETY: the memory is kept until the stream has ended.
    unsafe { copies.upload_before(source.clone(), target.0.pointer) }.map_err(failed)?;
    stream.copy(target.0, seen.0)?;
    let ordered = {
        stream.synchronize()?;
        seen.read()? == values
    };
    // It waits for the first stream, which was held up before, and not for the second.
    let (second, before, after) = (Stream::new()?, Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    stream.hold(&before)?;
    let (address, to_here) = (from.0.pointer, copies.alloc(bytes).map_err(failed)?);
    let beside = std::thread::scope(|scope| {
        // SAFETY: nobody writes the memory, which outlives the copy.
        let copier = scope.spawn(|| unsafe { copies.download(address, to_here) });
        std::thread::sleep(Duration::from_millis(50));
        let waits = !copier.is_finished();
        let held = second.hold(&after);
        before.store(true, Ordering::Release);
        let copied = copier.join();
        after.store(true, Ordering::Release);
        held.and_then(|()| stream.synchronize()).and_then(|()| second.synchronize())?;
        Ok::<bool, End>(waits && copied.is_ok_and(|copied| copied.is_ok()))
    })?;
    report.line(comm, "order of copies", ordered && beside, "before what follows; beside what is given later")?;

    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let mut kept = Some(copies.alloc(bytes).map_err(failed)?);
    let down = timed(|| {
        let to = kept.take().expect("each round gives it back");
        // SAFETY: as above.
        kept = Some(unsafe { copies.download(from.0.pointer, to) }.map_err(failed)?);
        Ok(())
    })?;
    // SAFETY: as above.
    let up = timed(|| unsafe { copies.upload(&source, to.0.pointer) }.map_err(failed))?;
    let ordinary = source.to_vec();
    // SAFETY: as above.
    let slow = timed(|| unsafe { copies.upload(&ordinary, to.0.pointer) }.map_err(failed))?;
    let detail = format!(
        "{mib} MiB, GB/s: down {:.1}, up {:.1}, up from ordinary memory {:.1}",
        rate(down),
        rate(up),
        rate(slow)
    );
    report.line(comm, "rate of copies", true, &detail)
}

/// Checks that a communicator whose last rank is missing is aborted at its deadline, on all ranks. With a single rank, that
/// rank's own work hangs instead.
fn deadline(comm: NcclComm, report: &mut Report) -> Result<(), End> {
    const LIMIT: Duration = Duration::from_secs(3);
    let (control, device) = (comm.control().clone(), comm.device());
    drop(comm);
    let options = NcclOptions { deadline: LIMIT, ..NcclOptions::default() };
    let comm = NcclComm::new(control, device, &options)?;
    let (rank, world) = (comm.rank(), comm.world());
    let memory = Memory::new(1 << 20, DType::F32)?;
    let stream = Stream::new()?;
    let open = Arc::new(AtomicBool::new(world > 1));
    stream.hold(&open)?;
    let opener = open.clone();
    let release = std::thread::spawn(move || {
        std::thread::sleep(LIMIT + Duration::from_secs(1));
        opener.store(true, Ordering::Release);
    });
    let begin = Instant::now();
    let error = if world > 1 && rank == world - 1 {
        while comm.health().is_ok() && begin.elapsed() < 4 * LIMIT {
            std::thread::sleep(Duration::from_millis(10));
        }
        comm.health().err()
    } else {
        let request = DeviceRequest::AllReduce { input: memory.0, output: memory.0, op: ReduceOp::Sum };
        // SAFETY: memory of this device, kept until the communicator has been aborted.
        let ticket = unsafe { issue(&comm, request, "a rank that does not come") };
        ticket.and_then(|ticket| ticket.wait()).err()
    };
    let took = begin.elapsed();
    // The thread only sleeps and stores.
    let _ = release.join();
    let Some(error) = error else {
        return Err(End(1, format!("rank {rank}: the operation ended, though a rank did not come to it")));
    };
    let good = matches!(error, CommError::Stalled { .. } | CommError::PeerFailed { .. })
        && took < 4 * LIMIT
        && comm.health().is_err_and(|again| again.to_string() == error.to_string());
    report.failed |= !good;
    if report.first || !good {
        let word = if good { "ok" } else { "FAILED" };
        println!("{word:<6} {:<34} after {:.1} s: {error}", "abort at the deadline", took.as_secs_f64());
    }
    Ok(())
}

fn check() -> Result<bool, End> {
    let mut numbers = std::env::args().skip(1).map(|text| {
        let number = text.parse::<usize>().ok().filter(|&number| number > 0);
        number.ok_or_else(|| {
            End(2, format!("expected a number above 0 (usage: nccl_check [MIB [SECONDS]]), got '{text}'"))
        })
    });
    let mib = numbers.next().transpose()?.unwrap_or(64);
    let seconds = numbers.next().transpose()?.unwrap_or(60);
    let options = NcclOptions { deadline: Duration::from_secs(seconds as u64), ..NcclOptions::default() };
    let begin = Instant::now();
    let comm = NcclComm::from_environment(&options)?;
    let (mut device, mut context) = (0, std::ptr::null_mut());
    // SAFETY: pointers are to locals; the context stays current on this thread, and is kept until the process ends.
    unsafe {
        cuda("cuDeviceGet", sys::cuDeviceGet(&raw mut device, comm.device() as i32))?;
        cuda("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        cuda("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(context))?;
    }
    let mut report = Report { first: comm.rank() == 0, failed: false };
    let detail = format!(
        "{} rank(s) on {} machine(s), {:.2} s",
        comm.world(),
        comm.control().place().nodes,
        begin.elapsed().as_secs_f64()
    );
    report.line(&comm, "communicator", true, &detail)?;
    results(&comm, &mut report)?;
    order(&comm, &mut report)?;
    let (here, there) = (comm.control().place().of_node(), comm.control().place().across_nodes());
    let (node, across) = (comm.split("node", here[0] as u64)?, comm.split("across", there[0] as u64)?);
    let one = Memory::of(&[1.0], DType::F32)?;
    let mut sums = Vec::new();
    for comm in [&node, &across] {
        let sum = Memory::new(1, DType::F32)?;
        let request = DeviceRequest::AllReduce { input: one.0, output: sum.0, op: ReduceOp::Sum };
        // SAFETY: memory of this device that is kept until the operation has ended.
        unsafe { issue(comm, request, "") }?.wait()?;
        sums.push(sum.read()?[0] as usize);
    }
    let good = sums == [node.world(), across.world()];
    report.line(&comm, "split", good, &format!("{} rank(s) of this machine, {} across", sums[0], sums[1]))?;
    drop((node, across));
    rates(&comm, &mut report, mib)?;
    copies(&comm, &mut report, mib)?;
    deadline(comm, &mut report)?;
    Ok(!report.failed)
}

fn main() -> ExitCode {
    match check() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(End(code, message)) => {
            eprintln!("nccl_check: {message}");
            ExitCode::from(code)
        }
    }
}
