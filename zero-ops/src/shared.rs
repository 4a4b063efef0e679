//! Tensors that threads share.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
#[cfg(feature = "cuda")]
use burn_std::{DType, Shape};

#[cfg(feature = "cuda")]
use crate::cube::any::{CudaSpan, uninit_on_cuda};
#[cfg(feature = "cubecl")]
use crate::cube::any::{Memory, into_memory};

/// A tensor that belongs to no thread: each thread gets its own tensor from it.
///
/// On devices a thread's operations are queued before they are submitted (by Burn's fusion in a lazy stream per thread, by CubeCL in a
/// queue). burn-fusion 0.21 miscounts the uses of a tensor on two streams: one stream's last use, or its drop, may run before another's
/// operation on it, which then finds no memory. So the operations that compute the tensor are submitted before it is shared, and threads
/// share the device's memory, which CubeCL orders between streams by itself. In host memory this is the tensor.
#[derive(Debug, Clone)]
pub struct Shared<B: Backend>(Held<B>);

enum Held<B: Backend> {
    Tensor(FloatTensor<B>),
    #[cfg(feature = "cubecl")]
    Memory(Box<dyn Memory<B>>),
}

impl<B: Backend> Shared<B> {
    /// Shares several tensors at the cost of one.
    pub fn many(tensors: Vec<FloatTensor<B>>) -> Vec<Self> {
        #[cfg(feature = "cubecl")]
        let tensors = match into_memory::<B>(tensors) {
            Ok(memory) => return memory.into_iter().map(|memory| Self(Held::Memory(memory))).collect(),
            Err(tensors) => tensors,
        };
        tensors.into_iter().map(Self::not).collect()
    }

    /// Keeps `tensor` unshared: only the calling thread may use it.
    pub fn not(tensor: FloatTensor<B>) -> Self {
        Self(Held::Tensor(tensor))
    }

    /// Allocates uninitialized memory on a CUDA device and returns its address, for copies from the host. `None` if the backend has other
    /// devices.
    #[cfg(feature = "cuda")]
    pub fn uninit_on_cuda(device: &B::Device, shape: Shape, dtype: DType) -> Option<(Self, CudaSpan)> {
        let (memory, span) = uninit_on_cuda::<B>(device, shape, dtype)?;
        Some((Self(Held::Memory(memory)), span))
    }

    /// Returns its address on a CUDA device, row-major without gaps and valid while this is held. All work that computes it has been
    /// submitted. `None` for a tensor of [`Shared::not`], and on other devices.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(&self) -> Option<CudaSpan> {
        match &self.0 {
            Held::Tensor(_) => None,
            Held::Memory(memory) => memory.on_cuda(),
        }
    }

    /// Returns a tensor for the calling thread.
    pub fn tensor(&self) -> FloatTensor<B> {
        match &self.0 {
            Held::Tensor(tensor) => tensor.clone(),
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => memory.tensor(),
        }
    }

    /// Returns the tensor by value: without a second handle, so that the backend may compute in place.
    pub fn into_tensor(self) -> FloatTensor<B> {
        match self.0 {
            Held::Tensor(tensor) => tensor,
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => memory.into_tensor(),
        }
    }
}

impl<B: Backend> Clone for Held<B> {
    fn clone(&self) -> Self {
        match self {
            Held::Tensor(tensor) => Held::Tensor(tensor.clone()),
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => Held::Memory(memory.duplicate()),
        }
    }
}

impl<B: Backend> core::fmt::Debug for Held<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Held::Tensor(_) => "a tensor",
            #[cfg(feature = "cubecl")]
            Held::Memory(_) => "memory of a device",
        })
    }
}
