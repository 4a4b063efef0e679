//! Tensors that threads share.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
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
#[derive(Debug)]
pub struct Shared<B: Backend> {
    shape: Shape,
    dtype: DType,
    device: B::Device,
    held: Held<B>,
}

enum Held<B: Backend> {
    Tensor(FloatTensor<B>),
    #[cfg(feature = "cubecl")]
    Memory(Box<dyn Memory<B>>),
}

impl<B: Backend> Shared<B> {
    /// Shares `tensor`.
    pub fn new(tensor: FloatTensor<B>) -> Self {
        Self::many(vec![tensor]).swap_remove(0)
    }

    /// Shares several tensors at the cost of one.
    pub fn many(tensors: Vec<FloatTensor<B>>) -> Vec<Self> {
        let about = |tensor: &FloatTensor<B>| (tensor.shape(), tensor.dtype(), B::float_device(tensor));
        let abouts: Vec<(Shape, DType, B::Device)> = tensors.iter().map(about).collect();
        let of = |((shape, dtype, device), held)| Self { shape, dtype, device, held };
        #[cfg(feature = "cubecl")]
        let tensors = match into_memory::<B>(tensors) {
            Ok(memory) => return abouts.into_iter().zip(memory.into_iter().map(Held::Memory)).map(of).collect(),
            Err(tensors) => tensors,
        };
        abouts.into_iter().zip(tensors.into_iter().map(Held::Tensor)).map(of).collect()
    }

    /// Keeps `tensor` unshared: only the calling thread may use it.
    pub fn not(tensor: FloatTensor<B>) -> Self {
        let (shape, dtype, device) = (tensor.shape(), tensor.dtype(), B::float_device(&tensor));
        Self { shape, dtype, device, held: Held::Tensor(tensor) }
    }

    /// Allocates uninitialized memory on a CUDA device and returns its address, for copies from the host. `None` if the backend has other
    /// devices.
    #[cfg(feature = "cuda")]
    pub fn uninit_on_cuda(device: &B::Device, shape: Shape, dtype: DType) -> Option<(Self, CudaSpan)> {
        let (memory, span) = uninit_on_cuda::<B>(device, shape.clone(), dtype)?;
        Some((Self { shape, dtype, device: device.clone(), held: Held::Memory(memory) }, span))
    }

    /// Returns its address on a CUDA device, row-major without gaps and valid while this is held. All work that computes it has been
    /// submitted. `None` for a tensor of [`Shared::not`], and on other devices.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(&self) -> Option<CudaSpan> {
        match &self.held {
            Held::Tensor(_) => None,
            Held::Memory(memory) => memory.on_cuda(),
        }
    }

    /// Returns a tensor for the calling thread.
    pub fn tensor(&self) -> FloatTensor<B> {
        match &self.held {
            Held::Tensor(tensor) => tensor.clone(),
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => memory.tensor(),
        }
    }

    /// Returns the tensor by value: without a second handle, so that the backend may compute in place.
    pub fn into_tensor(self) -> FloatTensor<B> {
        match self.held {
            Held::Tensor(tensor) => tensor,
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => memory.into_tensor(),
        }
    }

    /// Returns its type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns its shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns its device.
    pub fn device(&self) -> &B::Device {
        &self.device
    }
}

impl<B: Backend> Clone for Shared<B> {
    fn clone(&self) -> Self {
        let held = match &self.held {
            Held::Tensor(tensor) => Held::Tensor(tensor.clone()),
            #[cfg(feature = "cubecl")]
            Held::Memory(memory) => Held::Memory(memory.duplicate()),
        };
        Self { shape: self.shape.clone(), dtype: self.dtype, device: self.device.clone(), held }
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
