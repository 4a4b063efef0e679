//! Tensor collectives between ranks that are processes, issued by the rank's own thread in the order of the program.
//!
//! NCCL leaves tensors on their devices. An operation *begins* after all work submitted to the device so far. To *end* it is to order all
//! later work after it. In between, the device computes concurrently, and the host never waits. Without NCCL, tensors are read, sent by the
//! group of this module, and written back.
//!
//! On a mesh, an operation runs within the rank's group. A reduction continues over the ranks that hold the same shard in the other groups.
//!
//! NCCL does not compare what ranks call. So every rank keeps a hash of all its calls, and the ranks compare the hashes before anything is
//! updated ([`TensorCollectives::compare`]): ranks that differ end with an error, not with wrong parameters. If a rank does not arrive at all, the
//! others end at the deadline.

use std::sync::Arc;

use parking_lot::Mutex;
use zero_core::ReduceOp;
#[cfg(feature = "cuda")]
use zero_core::accounting::WireKind;
use zero_core::{Buffer, Collective, CommError, Mesh, OperationCall, Pending, Request};

use crate::backend::{Backend, HostData, Shape};
#[cfg(feature = "cuda")]
use crate::backend::{CudaSpan, DType, End, Shared};
use crate::random::sign;
use crate::values::flat_tensor;
use zero_core::config::Gathers;

/// The collective path: moves tensors between all ranks at once.
pub struct TensorCollectives {
    /// All ranks.
    comm: Arc<dyn Collective>,
    /// The ranks that hold the full model state between them.
    within: Group,
    /// The ranks that hold the same shard in the other groups, if there are other groups.
    across: Option<Group>,
    gathers: bool,
    issued: Mutex<Issued>,
}

/// Ranks that exchange tensors.
struct Group {
    comm: Arc<dyn Collective>,
    #[cfg(feature = "cuda")]
    nccl: Option<Nccl>,
}

/// The calls that this rank has made.
#[derive(Default)]
struct Issued {
    count: u64,
    sign: u64,
    last: String,
}

#[cfg(feature = "cuda")]
struct Nccl {
    comm: Arc<zero_core::collective::nccl::NcclComm>,
    /// The first error of an operation; operations are issued where no error can be returned.
    error: Arc<Mutex<Option<CommError>>>,
}

/// An operation in progress, which produces one tensor.
pub enum Begun<B: Backend> {
    /// In host memory.
    Host {
        /// The collective.
        pending: Pending,
        /// No tensor of the backend is held here.
        _backend: std::marker::PhantomData<fn() -> B>,
    },
    /// On a CUDA device.
    #[cfg(feature = "cuda")]
    Device {
        /// The result.
        made: Shared<B>,
        /// The operation that computes it.
        begun: B::Operation,
    },
}

/// Number of bytes in which a rank reports its calls: their number, their hash, and the name of the last.
const REPORT_BYTES: usize = 192;

impl TensorCollectives {
    /// Creates the path for the ranks of `comm`, which are processes and form `mesh`. A collective of the group.
    ///
    /// # Errors
    ///
    /// If a collective fails.
    pub fn new<B: Backend>(
        comm: Arc<dyn Collective>,
        mesh: Mesh,
        device: &B::Device,
        gathers: Gathers,
    ) -> Result<Self, CommError> {
        let within = match mesh.replicas() {
            1 => comm.clone(),
            _ => comm.split("tensors within", mesh.replica(comm.rank()) as u64)?,
        };
        let across = match mesh.replicas() {
            1 => None,
            _ => Some(comm.split("tensors across", mesh.shard(comm.rank()) as u64)?),
        };
        #[cfg(not(feature = "cuda"))]
        let (_, on_device) = (device, false);
        #[cfg(feature = "cuda")]
        let mut nccl = Nccl::of_groups::<B>(&comm, mesh, device)?;
        #[cfg(feature = "cuda")]
        let on_device = !nccl.is_empty();
        Ok(Self {
            comm,
            gathers: match gathers {
                Gathers::Auto => on_device,
                Gathers::Collective => true,
                Gathers::OneSided => false,
            },
            issued: Mutex::default(),
            // `pop` returns the last group first.
            across: across.map(|comm| Group {
                comm,
                #[cfg(feature = "cuda")]
                nccl: nccl.pop(),
            }),
            within: Group {
                comm: within,
                #[cfg(feature = "cuda")]
                nccl: nccl.pop(),
            },
        })
    }

    /// Returns whether all ranks gather parameters collectively.
    pub fn gathers(&self) -> bool {
        self.gathers
    }

    /// Returns whether sums are rounded at every step to the type of their terms.
    pub fn rounds_sums(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.within.nccl.is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Begins to sum `bucket` `[ranks of the group, columns]` over the group. The result is flat: this rank's row if `is_scattered`,
    /// otherwise all rows.
    pub fn begin_reduction<B: Backend>(
        &self,
        bucket: B::Tensor,
        is_scattered: bool,
        name: &str,
    ) -> Result<Begun<B>, CommError> {
        self.check()?;
        self.note(if is_scattered { "reduce_scatter" } else { "all_reduce" }, name, [B::numel(&bucket)]);
        Ok(self.within.reduce(bucket, is_scattered, name))
    }

    /// Ends a reduction within the group, sums its result over all groups, and returns the sum, flat, on `device`.
    pub fn end_reduction<B: Backend>(&self, begun: Begun<B>, device: &B::Device) -> Result<B::Tensor, CommError> {
        let sum = self.end(begun, device)?;
        let Some(across) = &self.across else { return Ok(sum) };
        const NAME: &str = "gradients of all groups";
        self.note("all_reduce", NAME, [B::numel(&sum)]);
        self.end(across.reduce::<B>(sum, false, NAME), device)
    }

    /// Begins to gather the ranks' `rows`, each equally long on every rank; with NCCL in one operation. `outputs` has the name and the shape
    /// of each gathered tensor. Bytes are counted as received, filler included.
    pub fn begin_gathers<B: Backend>(
        &self,
        rows: Vec<B::Tensor>,
        outputs: Vec<(String, Shape)>,
    ) -> Result<Vec<Begun<B>>, CommError> {
        self.check()?;
        for (row, (name, shape)) in rows.iter().zip(&outputs) {
            self.note("all_gather", name, shape.iter().copied().chain([B::dtype(row).size()]));
        }
        Ok(self.within.gather(rows, outputs.into_iter().map(|(name, _)| name).collect()))
    }

    /// Ends an operation and returns its result, flat, on `device`.
    pub fn end<B: Backend>(&self, begun: Begun<B>, device: &B::Device) -> Result<B::Tensor, CommError> {
        match begun {
            Begun::Host { pending, .. } => Ok(flat_tensor::<B>(pending.wait()?, device)),
            #[cfg(feature = "cuda")]
            Begun::Device { made, begun } => Ok(B::end_on_cuda(begun, vec![made.into_tensor()]).swap_remove(0)),
        }
    }

    /// Checks that no operation begun so far has failed.
    pub fn check(&self) -> Result<(), CommError> {
        #[cfg(feature = "cuda")]
        for nccl in std::iter::once(&self.within).chain(&self.across).filter_map(|group| group.nccl.as_ref()) {
            if let Some(error) = nccl.error.lock().clone() {
                return Err(error);
            }
            nccl.comm.health()?;
        }
        Ok(())
    }

    /// Waits until all operations that the ranks have begun through host memory have ended. A collective.
    pub fn finish(&self) -> Result<(), CommError> {
        self.check()?;
        self.comm.execute(Request::Barrier("before a rank ends")).map(drop)
    }

    /// Waits until every rank has come this far (`purpose`), and compares the calls of all ranks up to here.
    ///
    /// # Errors
    ///
    /// [`CommError::Mismatch`], on every rank, if they differ; also if a collective fails.
    pub fn compare(&self, main: &dyn Collective, purpose: &str) -> Result<(), CommError> {
        self.check()?;
        let (mine, here) = {
            let issued = self.issued.lock();
            let mut mine = [issued.count.to_le_bytes(), issued.sign.to_le_bytes()].concat();
            mine.extend(issued.last.bytes().take(REPORT_BYTES - mine.len()));
            mine.resize(REPORT_BYTES, b' ');
            (mine, issued.count)
        };
        let all = main.execute_for(Request::AllGather(Buffer::U8(mine.clone())), purpose)?.into_u8();
        let report = |bytes: &[u8]| {
            let number = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
            format!("{number} collective(s), the last one {}", String::from_utf8_lossy(&bytes[16..]).trim_end())
        };
        match all.chunks_exact(REPORT_BYTES).position(|other| other[..16] != mine[..16]) {
            None => Ok(()),
            Some(other) => Err(CommError::Mismatch {
                at: OperationCall::new(self.comm.label(), here, self.comm.place().rank, report(&mine)),
                other_rank: self.comm.members()[other],
                other_op: format!(
                    "{} (if ranks use different parameters or another order, set ZeroConfig::gathers = OneSided)",
                    report(&all[other * REPORT_BYTES..][..REPORT_BYTES])
                ),
            }),
        }
    }

    fn note(&self, op: &str, name: &str, sizes: impl IntoIterator<Item = usize>) {
        let mut issued = self.issued.lock();
        let last = format!("{op} of {name}");
        let words = last.bytes().map(u64::from).chain(sizes.into_iter().map(|size| size as u64));
        issued.sign = words.fold(issued.sign, |sum, word| sign(&[sum, word]));
        issued.count += 1;
        issued.last = last;
    }
}

impl Group {
    fn reduce<B: Backend>(&self, bucket: B::Tensor, is_scattered: bool, name: &str) -> Begun<B> {
        #[cfg(feature = "cuda")]
        let bucket = match &self.nccl {
            Some(nccl) => match nccl.reduce::<B>(&self.comm, bucket, is_scattered, name) {
                Ok(begun) => return begun,
                Err(bucket) => bucket,
            },
            None => bucket,
        };
        let buffer = B::read(bucket).into_buffer();
        let request = match is_scattered {
            true => Request::ReduceScatter(buffer, ReduceOp::Sum),
            false => Request::AllReduce(buffer, ReduceOp::Sum),
        };
        Begun::Host { pending: self.comm.start_for(request, name), _backend: std::marker::PhantomData }
    }

    fn gather<B: Backend>(&self, rows: Vec<B::Tensor>, names: Vec<String>) -> Vec<Begun<B>> {
        #[cfg(feature = "cuda")]
        let rows = match &self.nccl {
            Some(nccl) => {
                let name = match &names[..] {
                    [first, .., last] => format!("{} gathers from {first} to {last}", names.len()),
                    one => one.concat(),
                };
                match nccl.gather::<B>(&self.comm, rows, &name) {
                    Ok(begun) => return begun,
                    Err(rows) => rows,
                }
            }
            None => rows,
        };
        let begin = |(row, name): (B::Tensor, &String)| Begun::Host {
            pending: self.comm.start_for(Request::AllGather(B::read(row).into_buffer()), name),
            _backend: std::marker::PhantomData,
        };
        rows.into_iter().zip(&names).map(begin).collect()
    }
}

#[cfg(feature = "cuda")]
impl Nccl {
    /// Creates the communicators within the rank's group of `mesh` and, if there are other groups, across them. Returns none unless every
    /// rank of `comm` has a GPU of its own and the NCCL library.
    fn of_groups<B: Backend>(
        comm: &Arc<dyn Collective>,
        mesh: Mesh,
        device: &B::Device,
    ) -> Result<Vec<Self>, CommError> {
        use zero_core::collective::nccl::{NcclComm, NcclError, NcclOptions};

        let Some(ordinal) = B::cuda_ordinal(device) else { return Ok(Vec::new()) };
        // All or none: creating a communicator is a collective, and sums must be rounded the same way everywhere.
        let lacks = u8::from(!zero_core::collective::nccl::is_there());
        if comm.all_reduce(Buffer::U8(vec![lacks]), ReduceOp::Max)?.into_u8() != [0] {
            tracing::warn!("NCCL was not found on every rank: collectives go through host memory");
            return Ok(Vec::new());
        }
        let options = NcclOptions { deadline: comm.deadline(), ..NcclOptions::default() };
        let all = match NcclComm::new(comm.duplicate("nccl")?, ordinal, &options) {
            Ok(all) => all,
            Err(NcclError::Comm(error)) => return Err(error),
            // Every rank meets these errors by itself.
            Err(error @ (NcclError::Duplicate { .. } | NcclError::Versions { .. })) => {
                tracing::warn!("collectives go through host memory: {error}");
                return Ok(Vec::new());
            }
            Err(error) => {
                return Err(CommError::Device {
                    at: OperationCall::new(comm.label(), 0, comm.place().rank, "creating an NCCL communicator"),
                    reason: error.to_string().into(),
                });
            }
        };
        let groups = match mesh.replicas() {
            1 => vec![all],
            _ => vec![
                all.split("nccl within", mesh.replica(comm.rank()) as u64)?,
                all.split("nccl across", mesh.shard(comm.rank()) as u64)?,
            ],
        };
        Ok(groups.into_iter().map(|comm| Self { comm: Arc::new(comm), error: Arc::default() }).collect())
    }

    /// Begins one operation, which produces a tensor for each input. Returns the inputs if they are not on CUDA.
    fn begin<B: Backend>(
        &self,
        inputs: Vec<B::Tensor>,
        outputs: Vec<(Shape, DType)>,
        name: &str,
        request: impl Fn(
            zero_core::collective::nccl::DeviceSlice,
            zero_core::collective::nccl::DeviceSlice,
        ) -> zero_core::collective::nccl::DeviceRequest
        + Send
        + Sync
        + 'static,
    ) -> Result<Vec<Begun<B>>, Vec<B::Tensor>> {
        use zero_core::collective::nccl::{Compute, DeviceSlice};

        let types: Vec<DType> = inputs.iter().map(|input| B::dtype(input)).collect();
        let (comm, error, name) = (self.comm.clone(), self.error.clone(), name.to_owned());
        let begin = move |inputs: &[CudaSpan], outputs: &[CudaSpan]| {
            let slice = |span: &CudaSpan, dtype| DeviceSlice { pointer: span.pointer, len: span.elements, dtype };
            let requests: Vec<_> = inputs
                .iter()
                .zip(outputs)
                .zip(&types)
                .map(|((input, output), &dtype)| request(slice(input, dtype), slice(output, dtype)))
                .collect();
            // SAFETY: both are memory of CubeCL's primary context of the communicator's device, held until later work is
            // ordered after the operation (`OnCuda`); the operation comes after all work so far (`Compute::Context`), and
            // nobody writes the inputs or uses the outputs before.
            match unsafe { comm.submit(&requests, Compute::Context, &name) } {
                Ok(ticket) => {
                    let error = error.clone();
                    let end = move || {
                        if let Err(failed) = ticket.order_compute() {
                            error.lock().get_or_insert(failed);
                        }
                    };
                    Some(Box::new(end) as End)
                }
                Err(failed) => {
                    error.lock().get_or_insert(failed);
                    None
                }
            }
        };
        let (made, begun) = B::begin_on_cuda("collective over NCCL", inputs, outputs, begin)?;
        // Submitted to the device now, not when fusion flushes: other ranks wait for it.
        let made = Shared::many(made).into_iter().map(|made| Begun::Device { made, begun: begun.clone() });
        Ok(made.collect())
    }

    fn gather<B: Backend>(
        &self,
        group: &Arc<dyn Collective>,
        rows: Vec<B::Tensor>,
        name: &str,
    ) -> Result<Vec<Begun<B>>, Vec<B::Tensor>> {
        use zero_core::collective::nccl::DeviceRequest;

        let world = self.comm.world();
        let full = |row: &B::Tensor| (Shape::from([B::numel(row) * world]), B::dtype(row));
        let outputs: Vec<(Shape, DType)> = rows.iter().map(full).collect();
        let bytes: usize = rows.iter().map(|row| B::numel(row) * B::dtype(row).size()).sum();
        let begun = self.begin::<B>(rows, outputs, name, |input, output| DeviceRequest::AllGather { input, output })?;
        group.count_received(WireKind::AllGather, bytes * (world - 1));
        Ok(begun)
    }

    fn reduce<B: Backend>(
        &self,
        group: &Arc<dyn Collective>,
        bucket: B::Tensor,
        is_scattered: bool,
        name: &str,
    ) -> Result<Begun<B>, B::Tensor> {
        use zero_core::collective::nccl::DeviceRequest;

        let (world, elements, dtype) = (self.comm.world(), B::numel(&bucket), B::dtype(&bucket));
        let row = elements / world;
        let request = move |input, output| match is_scattered {
            true => DeviceRequest::ReduceScatter { input, output, op: ReduceOp::Sum },
            false => DeviceRequest::AllReduce { input, output, op: ReduceOp::Sum },
        };
        let output = (Shape::from([if is_scattered { row } else { elements }]), dtype);
        let begun = self.begin::<B>(vec![bucket], vec![output], name, request);
        let begun = begun.map_err(|mut bucket| bucket.swap_remove(0))?.swap_remove(0);
        match is_scattered {
            true => group.count_received(WireKind::ReduceScatter, row * dtype.size() * (world - 1)),
            false => group.count_received(WireKind::AllReduce, 2 * elements * dtype.size() * (world - 1) / world),
        }
        Ok(begun)
    }
}

#[cfg(test)]
mod tests {
    use zero_core::collective::threads::{ThreadOptions, run};

    use super::*;
    use crate::testing::Host;

    #[test]
    fn ranks_that_call_something_else_are_told_so_before_an_update() {
        let report = run(2, &ThreadOptions::default(), |comm| -> Result<String, CommError> {
            let rank = comm.rank();
            let collectives = {
                let mesh = Mesh::new(2, 2).unwrap();
                TensorCollectives::new::<Host>(comm.duplicate("tensors")?, mesh, &(), Gathers::Collective)?
            };
            collectives.note("all_gather", "parameter 1 [4, 4]", [4, 4]);
            collectives.compare(&*comm, "before an update")?;
            collectives.note("all_gather", &format!("parameter {} [4, 4]", 2 + rank), [4, 4]);
            Ok(collectives.compare(&*comm, "before an update").unwrap_err().to_string())
        });
        for (rank, report) in report.unwrap().iter().enumerate() {
            let last = |rank: usize| {
                format!("called 2 collective(s), the last one all_gather of parameter {} [4, 4]", 2 + rank)
            };
            assert!(report.contains(&last(rank)) && report.contains(&last(1 - rank)), "{report}");
            assert!(report.contains("gathers = OneSided"), "{report}");
        }
    }
}
