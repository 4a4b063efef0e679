//! Shards outside of the backend's memory: in host memory or in this rank's swap file, and handles to them.
//!
//! A shard that is [`OnDisk`] is transferred through a few buffers of constant size, several of them in flight, to or from memory that the
//! caller provides. No thread holds a buffer while it waits for another one, so a rank's threads, and the ranks that read its shards, can
//! share the pool.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use burn_backend::{Backend, Element, TensorData};
use burn_std::{DType, Shape};
use half::{bf16, f16};
use zero_core::offload::{
    BufferPool, DiskError, PendingTransfer, PoolOptions, Region, SwapBuffer, SwapDir, SwapFile, SwapFileOptions,
};

use zero_ops::Shared;
use zero_ops::cpu::buffer_of;

use crate::config::Disk;
use crate::mover::{For, Mover};
use crate::trouble::{or_stop, stop};
use crate::values::elements_of;

/// This rank's file, and the buffers for its data.
pub(crate) struct SwapDisk {
    pub(crate) file: SwapFile,
    pub(crate) pool: BufferPool,
    pub(crate) settings: Disk,
}

impl SwapDisk {
    /// Opens a file of this rank's own below the configured folder.
    pub(crate) fn open(rank: usize, settings: &Disk) -> Result<Arc<Self>, DiskError> {
        let dir = SwapDir::open(&settings.path)?;
        let file =
            dir.create_file(rank, &SwapFileOptions { aio: settings.aio.clone(), ..SwapFileOptions::default() })?;
        let pool = BufferPool::new(&PoolOptions {
            count: settings.buffer_count,
            bytes: settings.buffer_bytes,
            alignment: file.alignment(),
            pin_memory: settings.pin_memory,
            ..PoolOptions::default()
        })?;
        Ok(Arc::new(Self { file, pool, settings: settings.clone() }))
    }

    /// Allocates space for a shard of `bytes`; its content is undefined until it is written.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Arc<OnDisk>, DiskError> {
        self.place(bytes, None)
    }

    /// Writes a shard; `squares` is its elements' sum of squares, if it has been computed.
    pub(crate) fn store(self: &Arc<Self>, bytes: &[u8], squares: Option<f64>) -> Result<Arc<OnDisk>, DiskError> {
        let stored = self.place(bytes.len(), squares)?;
        stored.write(bytes)?;
        Ok(stored)
    }

    fn place(self: &Arc<Self>, bytes: usize, squares: Option<f64>) -> Result<Arc<OnDisk>, DiskError> {
        Ok(Arc::new(OnDisk { region: self.file.alloc(bytes)?, disk: self.clone(), squares }))
    }
}

/// The place where shards of a kind are kept.
#[derive(Clone, Copy)]
pub(crate) enum Home<'a> {
    /// Kept with the backend, as tensors.
    Backend,
    Host,
    Disk(&'a Arc<SwapDisk>),
}

/// A shard that is not a tensor of the backend.
#[derive(Clone)]
pub(crate) enum Stored {
    /// In host memory, flat.
    Host(Arc<TensorData>),
    Disk(Arc<OnDisk>),
}

impl Stored {
    /// Moves a shard out of the backend's memory. Before a shard of 32-bit or 16-bit elements goes to a disk, the squares of elements
    /// `counted` are summed; other types are summed by the backend, in its order, on demand.
    pub(crate) fn of<B: Backend>(
        home: Home<'_>,
        piece: Shared<B>,
        mover: &Mover,
        counted: Option<Range<usize>>,
    ) -> Result<Result<Self, Shared<B>>, DiskError> {
        Ok(match home {
            Home::Backend => Err(piece),
            Home::Host => Ok(Stored::Host(Arc::new(mover.to_host(piece)))),
            Home::Disk(disk) => {
                let data = mover.to_host(piece);
                let squares = counted.and_then(|range| Some(elements_of(&data)?.slice(range).sum_of_squares()));
                Ok(Stored::Disk(disk.store(data.as_bytes(), squares)?))
            }
        })
    }

    /// Reads the full shard, without filler, into `out`, which is equally long.
    pub(crate) fn read_into(&self, out: &mut [u8]) -> Result<(), DiskError> {
        match self {
            Stored::Host(data) => {
                out.copy_from_slice(&data.as_bytes()[..out.len()]);
                Ok(())
            }
            Stored::Disk(on_disk) => on_disk.read_into(out),
        }
    }

    /// Returns the sum of squares that was computed when the shard was moved to a disk.
    pub(crate) fn squares(&self) -> Option<f64> {
        match self {
            Stored::Host(_) => None,
            Stored::Disk(on_disk) => on_disk.squares,
        }
    }

    /// Returns the shard's data, if it is in host memory.
    pub(crate) fn host(&self) -> Option<&Arc<TensorData>> {
        match self {
            Stored::Host(data) => Some(data),
            Stored::Disk(_) => None,
        }
    }
}

/// A shard in a rank's file; its space is freed when the last handle is dropped.
pub(crate) struct OnDisk {
    region: Region,
    pub(crate) disk: Arc<SwapDisk>,
    /// For a gradient, the sum of squares of the elements that count for its norm: reading them for it would take as long as writing them
    /// did.
    pub(crate) squares: Option<f64>,
}

impl OnDisk {
    pub(crate) fn region(&self) -> Region {
        self.region
    }

    /// Writes the full shard.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), DiskError> {
        let mut rest = bytes;
        let start = |part: Region, mut buffer: SwapBuffer| {
            let (now, later) = rest.split_at(part.bytes());
            buffer.set_len(now.len());
            buffer.bytes_mut().copy_from_slice(now);
            rest = later;
            self.disk.file.write(part, buffer)
        };
        self.transfer(start, |_| {})
    }

    /// Reads the full shard into `out`, which is equally long.
    pub(crate) fn read_into(&self, out: &mut [u8]) -> Result<(), DiskError> {
        let mut rest = out;
        let end = |buffer: &SwapBuffer| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut(buffer.len());
            now.copy_from_slice(buffer.bytes());
            rest = later;
        };
        self.transfer(|part, buffer| self.disk.file.read(part, buffer), end)
    }

    /// Transfers the shard part by part, in order, with one part in flight per free buffer.
    fn transfer(
        &self,
        mut start: impl FnMut(Region, SwapBuffer) -> Result<PendingTransfer, DiskError>,
        mut end: impl FnMut(&SwapBuffer),
    ) -> Result<(), DiskError> {
        let (pool, limit) = (&self.disk.pool, self.disk.settings.limit);
        let mut flying: VecDeque<PendingTransfer> = VecDeque::new();
        for part in self.region.parts(pool.buffer_bytes()) {
            let buffer = loop {
                match (pool.try_take_many(1), flying.pop_front()) {
                    (Some(mut buffers), oldest) => {
                        if let Some(oldest) = oldest {
                            flying.push_front(oldest);
                        }
                        break buffers.swap_remove(0);
                    }
                    // The oldest part's buffer is the next one that is free.
                    (None, Some(oldest)) => end(&oldest.wait(limit)?),
                    (None, None) => break pool.take(limit)?,
                }
            };
            flying.push_back(start(part, buffer)?);
        }
        flying.into_iter().try_for_each(|ticket| {
            end(&ticket.wait(limit)?);
            Ok(())
        })
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        if let Err(error) = self.disk.file.free(self.region) {
            tracing::error!("{error}");
        }
    }
}

/// Returns `elements` numbers of type `dtype` for `mover` to move. `fill`, or a later writer, must write all of them: they are not cleared.
pub(crate) fn filled(
    mover: &Mover,
    elements: usize,
    dtype: DType,
    shape: impl Into<Shape>,
    fill: impl FnOnce(&mut [u8]),
) -> TensorData {
    if let Some(mut data) = mover.array(elements, dtype) {
        fill(&mut data.bytes);
        data.shape = shape.into();
        return data;
    }
    fn of<E: Element + bytemuck::Pod>(
        mut values: Vec<E>,
        shape: impl Into<Shape>,
        fill: impl FnOnce(&mut [u8]),
    ) -> TensorData {
        fill(bytemuck::cast_slice_mut(&mut values));
        TensorData::new(values, shape)
    }
    match dtype {
        DType::F32 => of(buffer_of::<f32>(elements), shape, fill),
        DType::F64 => of(vec![0f64; elements], shape, fill),
        DType::F16 => of(buffer_of::<f16>(elements), shape, fill),
        DType::BF16 => of(buffer_of::<bf16>(elements), shape, fill),
        other => stop(format!("a shard of type {other:?} cannot be kept on a disk: expected floats")),
    }
}

/// Loads the shard as a flat tensor.
pub(crate) fn fetch<B: Backend>(stored: &Stored, dtype: DType, device: &B::Device, mover: &Mover) -> Shared<B> {
    or_stop(fetch_shaped(stored, dtype, None, device, mover, For::Own))
}

/// Loads the shard as a tensor of `shape`, or a flat one, for `who`.
pub(crate) fn fetch_shaped<B: Backend>(
    stored: &Stored,
    dtype: DType,
    shape: Option<Shape>,
    device: &B::Device,
    mover: &Mover,
    who: For,
) -> Result<Shared<B>, DiskError> {
    let data = match stored {
        Stored::Host(data) => data.clone(),
        Stored::Disk(on_disk) => {
            let elements = on_disk.region.bytes() / dtype.size();
            let mut read = Ok(());
            let data = filled(mover, elements, dtype, [elements], |bytes| read = on_disk.read_into(bytes));
            read?;
            data.into()
        }
    };
    let shape = shape.unwrap_or_else(|| data.shape.clone());
    Ok(mover.to_backend(data, shape, device, who))
}
