//! Copies of shards between the backend's memory and host memory.
//!
//! On CUDA, host memory that shards pass through or stay in is page-locked, and copies run in streams of their own ([`zero_core::copies`]).
//! A copy requested by a thread other than the rank's own is waited for on that thread, while the device computes. A copy requested by the
//! rank's own thread is waited for by the next work that it submits to the device, and by no thread. On other devices, and with a driver
//! that is too old, the backend copies.

#[cfg(feature = "cuda")]
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use burn_backend::{Backend, TensorData};
#[cfg(feature = "cuda")]
use burn_std::{AllocationController, AllocationProperty, Bytes};
use burn_std::{DType, Shape};
#[cfg(feature = "cuda")]
use zero_core::copies::{Copies, CopyError, Pinned};
use zero_ops::Shared;

#[cfg(feature = "cuda")]
use crate::trouble::stop;
use crate::values::flat;
use crate::values::read;

/// The thread that requests a copy to the backend's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum For {
    /// The rank's own thread, which computes with it next.
    Own,
    /// Another thread of the rank.
    Beside,
}

/// The copier of a rank's shards.
#[derive(Default)]
pub(crate) struct Mover {
    #[cfg(feature = "cuda")]
    copies: Option<Arc<Copies>>,
}

impl Mover {
    /// Opens a mover for `device`; no copy may take longer than `deadline`.
    pub(crate) fn open<B: Backend>(device: &B::Device, deadline: Duration) -> Self {
        #[cfg(feature = "cuda")]
        if let Some(ordinal) = zero_ops::devices::cuda_ordinal::<B>(device) {
            let copies = Copies::open(ordinal, deadline)
                .inspect_err(|error| tracing::warn!("offload transfers do not overlap with computation: {error}"));
            return Self { copies: copies.ok() };
        }
        let _ = (device, deadline);
        Self::default()
    }

    /// Copies a shard's data to the host, flat, and waits for it.
    pub(crate) fn to_host<B: Backend>(&self, piece: Shared<B>) -> TensorData {
        #[cfg(feature = "cuda")]
        if let Some((copies, span)) = self.copies.as_ref().zip(piece.on_cuda())
            && let Some(pinned) = self.pinned(span.elements * piece.dtype().size())
        {
            // SAFETY: the piece is held, so that its memory stays; nobody writes to it while somebody holds it.
            let pinned = or_stop(unsafe { copies.download(span.pointer, pinned) });
            return data(pinned, span.elements, piece.dtype());
        }
        flat(read::<B>(piece.into_tensor()))
    }

    /// Returns a tensor of `shape` with this data. With [`For::Own`] only the calling thread may use it; with [`For::Beside`] the copy has
    /// ended on return.
    pub(crate) fn to_backend<B: Backend>(
        &self,
        data: impl Into<Arc<TensorData>>,
        shape: Shape,
        device: &B::Device,
        who: For,
    ) -> Shared<B> {
        let data: Arc<TensorData> = data.into();
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies
            && data.num_elements() > 0
            && let Some((made, span)) = Shared::<B>::uninit_on_cuda(device, shape.clone(), data.dtype)
        {
            assert_eq!(span.elements, data.num_elements(), "data and shape differ in size");
            let copied = match who {
                // SAFETY: the memory is new, so that nobody uses it before this has returned, and as large as the data; after
                // an error it is given up, and the data too (below).
                For::Beside => unsafe { copies.upload(data.as_bytes(), span.pointer) },
                // SAFETY: as above; later use of it comes after the copy, and also its use for something else.
                For::Own => unsafe { copies.upload_before(Arc::new(Source(data.clone())), span.pointer) },
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
        let mut data = Arc::unwrap_or_clone(data);
        data.shape = shape;
        let made = B::float_from_data(data, device);
        match who {
            For::Own => Shared::not(made),
            For::Beside => Shared::new(made),
        }
    }

    /// Releases the sources of copies that have ended, so that they are updated in place. Called before a step.
    pub(crate) fn sweep(&self) {
        #[cfg(feature = "cuda")]
        if let Some(copies) = &self.copies {
            copies.sweep();
        }
    }

    /// Returns a shard's data in host memory for an update in place: its own bytes if nothing else holds them, otherwise a copy.
    pub(crate) fn unshared(&self, data: Arc<TensorData>) -> TensorData {
        Arc::try_unwrap(data).unwrap_or_else(|shared| match self.array(shared.num_elements(), shared.dtype) {
            Some(mut copy) => {
                copy.bytes.copy_from_slice(shared.as_bytes());
                copy
            }
            None => TensorData::clone(&shared),
        })
    }

    /// Allocates a flat array of `elements` floats to be written; its initial values are arbitrary. `None` if it would be ordinary memory.
    pub(crate) fn array(&self, elements: usize, dtype: DType) -> Option<TensorData> {
        #[cfg(feature = "cuda")]
        return self.pinned(elements * dtype.size()).map(|pinned| data(pinned, elements, dtype));
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

#[cfg(feature = "cuda")]
fn data(pinned: Pinned, elements: usize, dtype: DType) -> TensorData {
    let len = pinned.len();
    // SAFETY: all bytes of page-locked memory have values, `len` of them.
    let bytes = unsafe { Bytes::from_controller(Box::new(PageLocked(pinned)), len) };
    TensorData::from_bytes(bytes, [elements], dtype)
}

/// Page-locked memory as the allocation of a tensor's data.
#[cfg(feature = "cuda")]
struct PageLocked(Pinned);

#[cfg(feature = "cuda")]
impl AllocationController for PageLocked {
    fn alloc_align(&self) -> usize {
        // The driver's are pages; copies of the bytes, which ask for the same, know no more than this.
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Pinned
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes: &mut [u8] = &mut self.0;
        // SAFETY: the same bytes; the caller writes only bytes that have values.
        unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let bytes: &[u8] = &self.0;
        // SAFETY: the same bytes, which have values.
        unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) }
    }
}

/// Data that is being copied.
#[cfg(feature = "cuda")]
struct Source(Arc<TensorData>);

#[cfg(feature = "cuda")]
impl AsRef<[u8]> for Source {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}
