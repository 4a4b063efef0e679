//! One collective on a bucket that lies on a device, between ranks that are processes.
//!
//! With NCCL it stays there: an operation of the device's work, waited for by nobody. Otherwise it is read, sent by the group of
//! the gradients, and written back.

use std::sync::Arc;

use burn_backend::{Backend, Element, TensorData};
use burn_std::DType;
#[cfg(feature = "cuda")]
use parking_lot::Mutex;
use zero_core::{Buffer, Collective, CommError, Pending, ReduceOp, Request};

use crate::context::stop;
use crate::gather::read;

/// What moves buckets.
pub(super) struct Bulk {
    comm: Arc<dyn Collective>,
    #[cfg(feature = "cuda")]
    nccl: Option<Nccl>,
}

#[cfg(feature = "cuda")]
struct Nccl {
    comm: Arc<zero_core::collective::nccl::NcclComm>,
    /// The first error of an operation, which is issued where no error can be returned.
    error: Arc<Mutex<Option<CommError>>>,
}

/// A bucket's reduction under way.
pub(super) enum Reducing<B: Backend> {
    Host {
        pending: Pending,
        dtype: DType,
    },
    #[cfg(feature = "cuda")]
    Device(B::FloatTensorPrimitive),
    #[cfg(not(feature = "cuda"))]
    #[allow(dead_code)] // so that the type has its parameter
    Device(std::convert::Infallible, std::marker::PhantomData<B>),
}

impl Bulk {
    /// For the ranks of `comm`. A collective of the group.
    ///
    /// # Errors
    ///
    /// As any collective's.
    pub(super) fn new<B: Backend>(comm: &Arc<dyn Collective>, device: &B::Device) -> Result<Self, CommError> {
        #[cfg(not(feature = "cuda"))]
        let _ = device;
        Ok(Self {
            comm: comm.clone(),
            #[cfg(feature = "cuda")]
            nccl: Nccl::new::<B>(comm, device)?,
        })
    }

    /// Starts the sum over the ranks of `bucket` `[world, columns]`: this rank's row of it if it is scattered, or all rows.
    pub(super) fn start<B: Backend>(
        &self,
        bucket: B::FloatTensorPrimitive,
        is_scattered: bool,
        name: &str,
    ) -> Result<Reducing<B>, CommError> {
        #[cfg(feature = "cuda")]
        let bucket = match &self.nccl {
            Some(nccl) => match nccl.start::<B>(&self.comm, bucket, is_scattered, name)? {
                Ok(reduced) => return Ok(Reducing::Device(reduced)),
                Err(bucket) => bucket,
            },
            None => bucket,
        };
        let data = read::<B>(bucket);
        let (dtype, buffer) = (data.dtype, buffer(data));
        let request = match is_scattered {
            true => Request::ReduceScatter(buffer, ReduceOp::Sum),
            false => Request::AllReduce(buffer, ReduceOp::Sum),
        };
        Ok(Reducing::Host { pending: self.comm.start_for(request, name), dtype })
    }

    /// The sum, flat, on `device`.
    pub(super) fn finish<B: Backend>(
        &self,
        reducing: Reducing<B>,
        device: &B::Device,
    ) -> Result<B::FloatTensorPrimitive, CommError> {
        match reducing {
            Reducing::Host { pending, dtype } => {
                let data = match pending.wait()? {
                    Buffer::F32(values) => flat(values),
                    Buffer::F16(values) => flat(values),
                    Buffer::Bf16(values) => flat(values),
                    other => stop(format!("a bucket of {dtype:?} came back as {}", other.dtype().name())),
                };
                Ok(B::float_from_data(data, device))
            }
            #[cfg(feature = "cuda")]
            Reducing::Device(reduced) => Ok(reduced),
            #[cfg(not(feature = "cuda"))]
            Reducing::Device(never, _) => match never {},
        }
    }

    /// Whether all that was started has gone well so far.
    pub(super) fn check(&self) -> Result<(), CommError> {
        #[cfg(feature = "cuda")]
        if let Some(nccl) = &self.nccl {
            if let Some(error) = nccl.error.lock().clone() {
                return Err(error);
            }
            return nccl.comm.health();
        }
        Ok(())
    }
}

fn flat<E: Element>(values: Vec<E>) -> TensorData {
    let elements = values.len();
    TensorData::new(values, [elements])
}

/// What is sent, of a bucket's types.
fn buffer(data: TensorData) -> Buffer {
    const TYPES: &str = "a bucket is made of the type that it is sent as";
    match data.dtype {
        DType::F32 => Buffer::F32(data.into_vec().expect(TYPES)),
        DType::F16 => Buffer::F16(data.into_vec().expect(TYPES)),
        DType::BF16 => Buffer::Bf16(data.into_vec().expect(TYPES)),
        other => stop(format!("a bucket of {other:?} cannot be sent: expected floats of 32 or 16 bit")),
    }
}

#[cfg(feature = "cuda")]
impl Nccl {
    /// NCCL between the ranks, if each has a GPU of its own and the library.
    fn new<B: Backend>(comm: &Arc<dyn Collective>, device: &B::Device) -> Result<Option<Self>, CommError> {
        use zero_core::collective::nccl::{NcclComm, NcclError, NcclOptions};

        let Some(ordinal) = zero_ops::devices::cuda_ordinal::<B>(device) else { return Ok(None) };
        // All or none: making a communicator is a collective.
        let lacks = u8::from(!zero_core::collective::nccl::is_there());
        if comm.all_reduce(Buffer::U8(vec![lacks]), ReduceOp::Max)?.into_u8() != [0] {
            tracing::warn!("NCCL was not found on every rank: gradients go through the hosts' memory");
            return Ok(None);
        }
        let options = NcclOptions { deadline: comm.deadline(), ..NcclOptions::default() };
        match NcclComm::new(comm.duplicate("nccl")?, ordinal, &options) {
            Ok(comm) => Ok(Some(Self { comm: Arc::new(comm), error: Arc::default() })),
            Err(NcclError::Comm(error)) => Err(error),
            // Every rank comes to these by itself.
            Err(error @ (NcclError::Duplicate { .. } | NcclError::Versions { .. })) => {
                tracing::warn!("gradients go through the hosts' memory: {error}");
                Ok(None)
            }
            Err(error) => Err(CommError::Device {
                group: comm.label().into(),
                seq: 0,
                rank: comm.rank(),
                op: "making a communicator".into(),
                reason: error.to_string().into(),
            }),
        }
    }

    /// Puts the operation among the device's work; the bucket if it is not on CUDA.
    fn start<B: Backend>(
        &self,
        group: &Arc<dyn Collective>,
        bucket: B::FloatTensorPrimitive,
        is_scattered: bool,
        name: &str,
    ) -> Result<Result<B::FloatTensorPrimitive, B::FloatTensorPrimitive>, CommError> {
        use burn_backend::TensorMetadata;
        use zero_core::accounting::WireKind;
        use zero_core::collective::nccl::{Compute, DeviceRequest, DeviceSlice};

        if let Some(error) = self.error.lock().clone() {
            return Err(error);
        }
        let (world, elements, tensor_type) = (self.comm.world(), bucket.shape().num_elements(), bucket.dtype());
        let dtype = match tensor_type {
            DType::F16 => zero_core::collective::DType::F16,
            DType::BF16 => zero_core::collective::DType::Bf16,
            _ => zero_core::collective::DType::F32,
        };
        let row = elements / world;
        let (comm, error, name) = (self.comm.clone(), self.error.clone(), name.to_owned());
        let body = move |inputs: &[zero_ops::CudaSpan], outputs: &[zero_ops::CudaSpan]| {
            let slice = |span: zero_ops::CudaSpan| DeviceSlice { pointer: span.pointer, len: span.elements, dtype };
            let (input, output) = (slice(inputs[0]), slice(outputs[0]));
            let request = match is_scattered {
                true => DeviceRequest::ReduceScatter { input, output, op: ReduceOp::Sum },
                false => DeviceRequest::AllReduce { input, output, op: ReduceOp::Sum },
            };
            // SAFETY: both are memory of CubeCL's primary context of the communicator's device, held until this returns;
            // the operation comes after all work so far (`Compute::Context`), and `order_compute` makes all later work, by
            // which CubeCL may use the memory again, come after it. Nothing else writes them between.
            let done =
                unsafe { comm.submit(&[request], Compute::Context, &name) }.and_then(|ticket| ticket.order_compute());
            if let Err(failed) = done {
                error.lock().get_or_insert(failed);
            }
        };
        let shape = burn_std::Shape::new([if is_scattered { row } else { elements }]);
        let made = zero_ops::on_cuda::<B>("gradients over NCCL", vec![bucket], vec![(shape, tensor_type)], body);
        Ok(match made {
            Ok(mut made) => {
                let received = row * tensor_type.size() * (world - 1);
                match is_scattered {
                    true => group.wire().add(WireKind::ReduceScatter, received),
                    false => group.wire().add(WireKind::AllReduce, 2 * received),
                }
                Ok(made.swap_remove(0))
            }
            Err(mut bucket) => Err(bucket.swap_remove(0)),
        })
    }
}
