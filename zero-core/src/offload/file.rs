//! The swap file of one rank: regions, and their transfers.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::offload::backing::Backing;
use crate::offload::direction::Direction;
use crate::offload::engine::DiskEngine;
use crate::offload::regions::Regions;
use crate::offload::transfer::Transfer;
use crate::offload::{
    AioOptions, DiskError, DiskStats, EngineChoice, EngineKind, PendingTransfer, Region, SwapBuffer, SwapDir, folder,
};

/// Minimum growth of a file, if the disk has room, so that few allocations call the file system.
const GROWTH: u64 = 64 << 20;

/// Options of a swap file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapFileOptions {
    /// Size of chunks, and the number of chunks in flight.
    pub aio: AioOptions,
    /// Engine that transfers the bytes.
    pub engine: EngineChoice,
    /// Bypasses the page cache if the file system can. If it cannot, or this is off, transferred bytes are dropped from the page cache.
    pub direct: bool,
}

impl Default for SwapFileOptions {
    fn default() -> Self {
        Self { aio: AioOptions::default(), engine: EngineChoice::Auto, direct: true }
    }
}

/// A file of regions in a [`SwapDir`], for one rank. All methods may be called from several threads.
///
/// Dropping it completes submitted transfers and ends its threads; the file is removed with the folder.
pub struct SwapFile {
    engine: DiskEngine,
    backing: Arc<Backing>,
    block: usize,
    regions: Mutex<Regions>,
}

impl SwapDir {
    /// Creates the file of `rank`, and starts the threads that serve it.
    ///
    /// # Errors
    /// [`DiskError::Setting`] for an unsupported setting, [`DiskError::NoUring`] if io_uring was requested and is not available, and errors
    /// of creating the file and the threads.
    pub fn create_file(&self, rank: usize, options: &SwapFileOptions) -> Result<SwapFile, DiskError> {
        let backing = Backing::create(self.clone(), &format!("rank-{rank:05}.swap"), options.direct)?;
        options.aio.check(backing.alignment())?;
        let backing = Arc::new(backing);
        let engine = DiskEngine::start(&backing, rank, &options.aio, options.engine)?;
        let regions = Mutex::new(Regions::new(backing.alignment()));
        Ok(SwapFile { engine, backing, block: options.aio.block_size, regions })
    }
}

impl SwapFile {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        self.backing.path()
    }

    /// Returns the engine that transfers the bytes.
    pub fn engine(&self) -> EngineKind {
        self.engine.kind()
    }

    /// Returns whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.backing.is_direct()
    }

    /// Returns the alignment that buffers need: the logical block size of the disk, at least 4096.
    pub fn alignment(&self) -> usize {
        self.backing.alignment()
    }

    /// Returns the totals of the transfers so far.
    pub fn stats(&self) -> DiskStats {
        self.backing.counters.stats()
    }

    /// Returns the size of the file in bytes, allocated or not.
    pub fn reserved_bytes(&self) -> u64 {
        self.regions.lock().end()
    }

    /// Ensures that `bytes` more can be allocated, and reserves them on the disk if the file system can. Call it before the first step with
    /// everything that will be needed, so that no later step finds the disk full.
    ///
    /// # Errors
    /// [`DiskError::NoSpace`] or [`DiskError::FileTooLarge`], with the needed and the available bytes.
    pub fn require(&self, bytes: u64) -> Result<(), DiskError> {
        let mut regions = self.regions.lock();
        let missing = bytes.saturating_sub(regions.free_bytes());
        let Some(missing) = missing.checked_next_multiple_of(self.alignment() as u64) else {
            return Err(folder::no_space(self.path(), bytes, false));
        };
        if missing > 0 {
            // Fails early; the reservation would first take the space that is left.
            folder::require(self.backing.dir().path(), missing)?;
            self.backing.grow(regions.end(), missing)?;
            regions.grow(missing);
        }
        Ok(())
    }

    /// Allocates a region of `bytes`, of any length. Its contents are undefined until it is written.
    ///
    /// # Errors
    /// Same as [`SwapFile::require`], if the file has to grow.
    pub fn alloc(&self, bytes: usize) -> Result<Region, DiskError> {
        self.backing.check()?;
        let mut regions = self.regions.lock();
        let missing = regions.missing(bytes);
        if missing > 0 {
            let end = regions.end();
            let grown = match self.backing.grow(end, missing.max(GROWTH)) {
                Ok(()) => missing.max(GROWTH),
                // There is no room for the preferred growth: grow only by the missing bytes.
                Err(DiskError::NoSpace { .. } | DiskError::FileTooLarge { .. }) if missing < GROWTH => {
                    self.backing.grow(end, missing)?;
                    missing
                }
                Err(error) => return Err(error),
            };
            regions.grow(grown);
        }
        Ok(regions.take(bytes).expect("the file has grown by what was missing"))
    }

    /// Frees a region for reuse. Its transfers must have been waited for, except reads whose results are discarded.
    ///
    /// # Errors
    /// [`DiskError::NotAllocated`] if it is not a region of this file, or has already been freed.
    pub fn free(&self, region: Region) -> Result<(), DiskError> {
        if self.regions.lock().give(&region) { Ok(()) } else { Err(self.not_allocated(&region)) }
    }

    /// Starts to read a region into a buffer, which then has the region's length.
    ///
    /// # Errors
    /// [`DiskError::NotAllocated`], [`DiskError::Unfit`], [`DiskError::Truncated`] if another process has truncated the file, or
    /// [`DiskError::Stopped`] after an earlier transfer missed its deadline. Errors of the disk come from [`PendingTransfer::wait`].
    pub fn read(&self, region: Region, buffer: SwapBuffer) -> Result<PendingTransfer, DiskError> {
        self.submit(Direction::Read, region, buffer)
    }

    /// Starts to write the first bytes of a buffer, up to the region's length.
    ///
    /// # Errors
    /// Same as [`SwapFile::read`].
    pub fn write(&self, region: Region, buffer: SwapBuffer) -> Result<PendingTransfer, DiskError> {
        self.submit(Direction::Write, region, buffer)
    }

    fn submit(&self, direction: Direction, region: Region, buffer: SwapBuffer) -> Result<PendingTransfer, DiskError> {
        self.check(&region, &buffer)?;
        let (ticket, pieces) = Transfer::begin(direction, region, buffer, self.block, self.backing.clone());
        self.engine.submit(pieces);
        Ok(ticket)
    }

    /// Checks that a region can be transferred to or from a buffer.
    pub(crate) fn check(&self, region: &Region, buffer: &SwapBuffer) -> Result<(), DiskError> {
        self.backing.check()?;
        let reserved_bytes = {
            let regions = self.regions.lock();
            if !regions.holds(region) {
                drop(regions);
                return Err(self.not_allocated(region));
            }
            regions.end()
        };
        // A truncated file would read as zeros once a later write has extended it.
        self.backing.check_length(reserved_bytes)?;
        if region.padded_bytes() > buffer.capacity() || buffer.alignment() < self.alignment() {
            return Err(DiskError::Unfit {
                region_bytes: region.bytes(),
                padded_bytes: region.padded_bytes(),
                buffer_bytes: buffer.capacity(),
                buffer_alignment: buffer.alignment(),
                alignment: self.alignment(),
            });
        }
        Ok(())
    }

    fn not_allocated(&self, region: &Region) -> DiskError {
        DiskError::NotAllocated { path: self.path().to_path_buf(), offset: region.offset(), bytes: region.bytes() }
    }

    #[cfg(test)]
    pub(crate) fn faults(&self) -> &crate::offload::faults::Faults {
        &self.backing.faults
    }
}

impl fmt::Debug for SwapFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, engine, direct) = (self.path(), self.engine(), self.is_direct());
        let mut text = f.debug_struct("SwapFile");
        text.field("path", &path).field("engine", &engine).field("direct", &direct).finish_non_exhaustive()
    }
}
