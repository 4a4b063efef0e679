//! Copies of shards between the backend's memory and host memory.
//!
//! On CUDA, host memory that shards pass through or stay in is page-locked, and copies run in streams of their own (`zero_core::copies`).
//! A copy requested by a thread other than the rank's own is waited for on that thread, while the device computes. A copy requested by the
//! rank's own thread is waited for by the next work that it submits to the device, and by no thread. On other devices, and with a driver
//! that is too old, the backend copies.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cuda")]
use zero_core::copies::{Copies, CopyError, Pinned};

#[cfg(feature = "cuda")]
use crate::abort::stop;
use crate::backend::{Backend, DType, HostData, Shared};

/// The thread that requests a copy to the backend's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caller {
    /// The rank's own thread, which computes with it next.
    OwnThread,
    /// Another thread of the rank.
    OtherThread,
}

/// The copier of a rank's shards.
#[derive(Default)]
pub struct Copier {
    #[cfg(feature = "cuda")]
    copies: Option<Arc<Copies>>,
}

impl Copier {
    /// Opens a copier for `device`; no copy may take longer than `deadline`.
    pub fn open<B: Backend>(device: &B::Device, deadline: Duration) -> Self {
        #[cfg(feature = "cuda")]
        if let Some(ordinal) = B::cuda_ordinal(device) {
            let copies = Copies::open(ordinal, deadline)
                .inspect_err(|error| tracing::warn!("offload transfers do not overlap with computation: {error}"));
            return Self { copies: copies.ok() };
        }
        let _ = (device, deadline);
        Self::default()
    }

    /// Copies a shard's data to the host, flat, and waits for it.
    pub fn to_host<B: Backend>(&self, shard: Shared<B>) -> B::Data {
        #[cfg(feature = "cuda")]
        if let Some((copies, span)) = self.copies.as_ref().zip(B::on_cuda(&shard.held))
            && let Some(pinned) = self.pinned(span.elements * shard.dtype().size())
        {
            // SAFETY: the shard is held, so that its memory stays; nobody writes to it while somebody holds it.
            let pinned = or_stop(unsafe { copies.download(span.pointer, pinned) });
            return B::Data::from_pinned(pinned, span.elements, shard.dtype());
        }
        B::read(shard.into_tensor()).flat()
    }

    /// Returns a tensor of `shape` with this data. With [`Caller::OwnThread`] only the calling thread may use it; with [`Caller::OtherThread`] the copy has
    /// ended on return.
    pub fn to_backend<B: Backend>(
        &self,
        data: impl Into<Arc<B::Data>>,
        shape: &[usize],
        device: &B::Device,
        who: Caller,
    ) -> Shared<B> {
        let data: Arc<B::Data> = data.into();
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies
            && data.numel() > 0
            && let Some((made, span)) = Shared::<B>::uninit_on_cuda(device, shape, data.dtype())
        {
            assert_eq!(span.elements, data.numel(), "data and shape differ in size");
            let copied = match who {
                // SAFETY: the memory is new, so that nobody uses it before this has returned, and as large as the data; after
                // an error it is given up, and the data too (below).
                Caller::OtherThread => unsafe { copies.upload(data.bytes(), span.pointer) },
                // SAFETY: as above; later use of it comes after the copy, and also its use for something else.
                Caller::OwnThread => unsafe { copies.upload_before(Arc::new(Source(data.clone())), span.pointer) },
            };
            match copied {
                Ok(()) => return made,
                Err(error) => {
                    // The device may still execute the copy.
                    std::mem::forget((made, data));
                    stop(error.to_string());
                }
            }
        }
        let made = B::from_data(Arc::unwrap_or_clone(data).reshaped(shape), device);
        match who {
            Caller::OwnThread => Shared::not(made),
            Caller::OtherThread => Shared::new(made),
        }
    }

    /// Releases the sources of copies that have ended, so that they are updated in place. Called before a step.
    pub fn sweep(&self) {
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies {
            copies.sweep();
        }
    }

    /// Returns a shard's data in host memory for an update in place: its own bytes if nothing else holds them, otherwise a copy.
    pub fn unshared<D: HostData>(&self, data: Arc<D>) -> D {
        Arc::try_unwrap(data).unwrap_or_else(|shared| match self.array::<D>(shared.numel(), shared.dtype()) {
            Some(mut copy) => {
                copy.bytes_mut().copy_from_slice(shared.bytes());
                copy
            }
            None => D::clone(&shared),
        })
    }

    /// Allocates a flat array of `elements` floats to be written; its initial values are arbitrary. `None` if it would be ordinary memory.
    pub fn array<D: HostData>(&self, elements: usize, dtype: DType) -> Option<D> {
        #[cfg(feature = "cuda")]
        return self.pinned(elements * dtype.size()).map(|pinned| D::from_pinned(pinned, elements, dtype));
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (elements, dtype);
            None
        }
    }

    /// Allocates page-locked memory, if there is some.
    #[cfg(feature = "cuda")]
    fn pinned(&self, bytes: usize) -> Option<Pinned> {
        let copies = self.copies.as_ref().filter(|_| bytes > 0)?;
        // Ordinary memory works too, but slower.
        copies.alloc(bytes).inspect_err(|error| tracing::warn!("{error}")).ok()
    }
}

#[cfg(feature = "cuda")]
fn or_stop<T>(result: Result<T, CopyError>) -> T {
    result.unwrap_or_else(|error| stop(error.to_string()))
}

/// Data that is being copied.
#[cfg(feature = "cuda")]
struct Source<D>(Arc<D>);

#[cfg(feature = "cuda")]
impl<D: HostData> AsRef<[u8]> for Source<D> {
    fn as_ref(&self) -> &[u8] {
        self.0.bytes()
    }
}
