//! Shards outside of the backend's memory: in host memory or in this rank's swap file, and handles to them.
//!
//! A shard that is [`OnDisk`] is transferred through a few buffers of constant size, several of them in flight, to or from memory that the
//! caller provides. No thread holds a buffer while it waits for another one, and reads for the next update take at most half of the buffers,
//! so a rank's threads, and the ranks that read its shards, can share the pool.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use zero_core::Buffer;
use zero_core::offload::{
    BufferPool, DiskError, EarlyReads, PendingTransfer, PoolOptions, Region, SwapBuffer, SwapDir, SwapFile,
    SwapFileOptions,
};

use zero_kernels::cpu::buffer_of;

use crate::abort::{or_stop, stop};
use crate::backend::{Backend, DType, HostData, Shared};
use crate::copier::{Caller, Copier};
use crate::values::elements_of;
use zero_core::config::Disk;

/// This rank's file, and the buffers for its data.
pub struct SwapDisk {
    /// Reads for the next update.
    pub early: Mutex<EarlyReads>,
    /// The file.
    pub file: SwapFile,
    /// Buffers for transfers.
    pub pool: BufferPool,
    /// Path, limits and sizes.
    pub settings: Disk,
}

impl SwapDisk {
    /// Opens a file of this rank's own below the configured folder.
    pub fn open(rank: usize, settings: &Disk) -> Result<Arc<Self>, DiskError> {
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
        Ok(Arc::new(Self { early: Mutex::default(), file, pool, settings: settings.clone() }))
    }

    /// Allocates space for a shard of `bytes`; its content is undefined until it is written.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Arc<OnDisk>, DiskError> {
        self.place(bytes, None)
    }

    /// Writes a shard; `squares` is its elements' sum of squares, if it has been computed.
    pub fn store(self: &Arc<Self>, bytes: &[u8], squares: Option<f64>) -> Result<Arc<OnDisk>, DiskError> {
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
pub enum Home<'a> {
    /// Kept with the backend, as tensors.
    Backend,
    /// In host memory.
    Host,
    /// In this file.
    Disk(&'a Arc<SwapDisk>),
}

/// A shard that is not a tensor of the backend.
#[derive(Clone)]
pub enum Stored<B: Backend> {
    /// In host memory, flat.
    Host(Arc<B::Data>),
    /// In the file of a rank.
    Disk(Arc<OnDisk>),
}

impl<B: Backend> Stored<B> {
    /// Moves a shard out of the backend's memory. Before a shard of 32-bit or 16-bit elements goes to a disk, the squares of elements
    /// `counted` are summed; other types are summed by the backend, in its order, on demand.
    pub fn of(
        home: Home<'_>,
        shard: Shared<B>,
        copier: &Copier,
        counted: Option<Range<usize>>,
    ) -> Result<Result<Self, Shared<B>>, DiskError> {
        Ok(match home {
            Home::Backend => Err(shard),
            Home::Host => Ok(Stored::Host(Arc::new(copier.to_host(shard)))),
            Home::Disk(disk) => {
                let data = copier.to_host(shard);
                let squares = counted.and_then(|range| Some(elements_of(&data)?.slice(range).sum_of_squares()));
                Ok(Stored::Disk(disk.store(data.bytes(), squares)?))
            }
        })
    }

    /// Reads the full shard, without filler, into `out`, which is equally long.
    pub fn read_into(&self, out: &mut [u8]) -> Result<(), DiskError> {
        match self {
            Stored::Host(data) => {
                out.copy_from_slice(&data.bytes()[..out.len()]);
                Ok(())
            }
            Stored::Disk(on_disk) => on_disk.read_into(out),
        }
    }

    /// Returns the sum of squares that was computed when the shard was moved to a disk.
    pub fn squares(&self) -> Option<f64> {
        match self {
            Stored::Host(_) => None,
            Stored::Disk(on_disk) => on_disk.squares,
        }
    }

    /// Returns the shard's data, if it is in host memory.
    pub fn host(&self) -> Option<&Arc<B::Data>> {
        match self {
            Stored::Host(data) => Some(data),
            Stored::Disk(_) => None,
        }
    }
}

/// A shard in a rank's file; its space is freed when the last handle is dropped.
pub struct OnDisk {
    region: Region,
    /// The file that holds it.
    pub disk: Arc<SwapDisk>,
    /// For a gradient, the sum of squares of the elements that count for its norm: reading them for it would take as long as writing them
    /// did.
    pub squares: Option<f64>,
}

impl OnDisk {
    /// Returns its place in the file.
    pub fn region(&self) -> Region {
        self.region
    }

    /// Writes the full shard.
    pub fn write(&self, bytes: &[u8]) -> Result<(), DiskError> {
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
    pub fn read_into(&self, out: &mut [u8]) -> Result<(), DiskError> {
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

/// Returns `elements` numbers of type `dtype` for `copier` to move. `fill`, or a later writer, must write all of them: they are not cleared.
pub fn filled<D: HostData>(copier: &Copier, elements: usize, dtype: DType, fill: impl FnOnce(&mut [u8])) -> D {
    if let Some(mut data) = copier.array::<D>(elements, dtype) {
        fill(data.bytes_mut());
        return data;
    }
    fn of<E: bytemuck::Pod>(mut values: Vec<E>, fill: impl FnOnce(&mut [u8])) -> Vec<E> {
        fill(bytemuck::cast_slice_mut(&mut values));
        values
    }
    D::flat_of(match dtype {
        DType::F32 => Buffer::F32(of(buffer_of(elements), fill)),
        DType::F64 => Buffer::F64(of(vec![0.0; elements], fill)),
        DType::F16 => Buffer::F16(of(buffer_of(elements), fill)),
        DType::Bf16 => Buffer::Bf16(of(buffer_of(elements), fill)),
        DType::U8 => stop("a shard of bytes cannot be kept on a disk: expected floats".into()),
    })
}

/// Loads the shard as a flat tensor.
pub fn fetch<B: Backend>(stored: &Stored<B>, dtype: DType, device: &B::Device, copier: &Copier) -> Shared<B> {
    or_stop(fetch_shaped(stored, dtype, None, device, copier, Caller::OwnThread))
}

/// Loads the shard as a tensor of `shape`, or a flat one, for `who`.
///
/// # Errors
///
/// If the disk fails.
pub fn fetch_shaped<B: Backend>(
    stored: &Stored<B>,
    dtype: DType,
    shape: Option<&[usize]>,
    device: &B::Device,
    copier: &Copier,
    who: Caller,
) -> Result<Shared<B>, DiskError> {
    let data: Arc<B::Data> = match stored {
        Stored::Host(data) => data.clone(),
        Stored::Disk(on_disk) => {
            let elements = on_disk.region.bytes() / dtype.size();
            let mut read = Ok(());
            let data: B::Data = filled(copier, elements, dtype, |bytes| read = on_disk.read_into(bytes));
            read?;
            data.into()
        }
    };
    let own = [data.numel()];
    Ok(copier.to_backend(data, shape.unwrap_or(&own), device, who))
}
