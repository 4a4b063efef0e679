//! A fixed number of aligned buffers, mapped once, which are lent and returned when dropped.

use std::fmt;
use std::mem::{align_of, size_of};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::offload::DiskError;
use crate::offload::error::Size;
use crate::offload::memory::{HUGE, Memory};

/// A number type for which every bit pattern is a valid value, so that a buffer's bytes can be viewed as such numbers.
///
/// # Safety
/// Every bit pattern is a valid value, there is no padding, and the alignment is at most a page.
pub unsafe trait Element: Copy + Send + Sync + 'static {}

macro_rules! elements {
    ($($name:ty),*) => {
        // SAFETY: plain numbers (those of `half` are transparent wrappers of u16), aligned to their size.
        $(unsafe impl Element for $name {})*
    };
}

elements!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, half::f16, half::bf16);

/// Options of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOptions {
    /// Number of buffers: `buffer_count`.
    pub count: usize,
    /// Minimum size of each in bytes; rounded up to `alignment`.
    pub bytes: usize,
    /// Alignment of each buffer's address and length: the disk's [`SwapFile::alignment`](crate::offload::SwapFile::alignment), a power of
    /// two.
    pub alignment: usize,
    /// Locks the buffers into memory. If the system does not allow it, a warning is logged.
    pub pin_memory: bool,
    /// Asks for huge pages, which reduce the kernel's work per chunk.
    pub huge_pages: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { count: 4, bytes: 32 << 20, alignment: 4096, pin_memory: false, huge_pages: true }
    }
}

/// Buffers of equal size. A clone is another handle to the same buffers.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Arena>,
}

struct Arena {
    memory: Memory,
    count: usize,
    bytes: usize,
    alignment: usize,
    state: Mutex<State>,
    returned: Condvar,
}

struct State {
    /// Indices of the free buffers. The last one returned is lent first: the CPU's cache may have it.
    free: Vec<usize>,
    peak: usize,
}

impl BufferPool {
    /// Maps all buffers.
    ///
    /// # Errors
    /// [`DiskError::Setting`] for no buffers or an impossible alignment, [`DiskError::Memory`] if there is not enough memory.
    pub fn new(options: &PoolOptions) -> Result<Self, DiskError> {
        let refuse = |key, value: usize, reason: &str| {
            Err(DiskError::Setting { key, value: value.to_string(), reason: reason.to_string() })
        };
        if options.count == 0 {
            return refuse("buffer_count", 0, "a pool needs at least one buffer");
        }
        if options.bytes == 0 {
            return refuse("buffer_size", 0, "a buffer needs at least one byte");
        }
        if !options.alignment.is_power_of_two() || options.alignment < 4096 {
            return refuse("alignment", options.alignment, "it must be a power of two of at least 4096");
        }
        let bytes = options.bytes.checked_next_multiple_of(options.alignment);
        let Some((bytes, total)) = bytes.and_then(|bytes| Some((bytes, bytes.checked_mul(options.count)?))) else {
            return refuse("buffer_size", options.bytes, "all buffers together exceed the address space");
        };
        let huge_pages = options.huge_pages && total >= HUGE;
        let memory = Memory::map(total, if huge_pages { options.alignment.max(HUGE) } else { options.alignment })?;
        if huge_pages && let Err(error) = memory.ask_for_huge_pages() {
            tracing::warn!("huge_pages has no effect on {} of buffers: {error}", Size(total as u64));
        }
        if options.pin_memory
            && let Err(error) = memory.pin()
        {
            tracing::warn!(
                "pin_memory has no effect: cannot lock {} of buffers: {error}; raise the limit (ulimit -l), or set \
                 pin_memory to false",
                Size(total as u64)
            );
        }
        let state = State { free: (0..options.count).rev().collect(), peak: 0 };
        let (count, alignment) = (options.count, options.alignment);
        let shared = Arena { memory, count, bytes, alignment, state: Mutex::new(state), returned: Condvar::new() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the number of buffers.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Returns the size of each in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.shared.bytes
    }

    /// Returns the number of free buffers.
    pub fn free(&self) -> usize {
        self.shared.state.lock().free.len()
    }

    /// Returns the maximum number of buffers lent at the same time so far.
    pub fn peak(&self) -> usize {
        self.shared.state.lock().peak
    }

    /// Borrows a buffer; waits up to `limit` for one.
    ///
    /// # Errors
    /// [`DiskError::Deadline`] if none was returned in time.
    pub fn take(&self, limit: Duration) -> Result<SwapBuffer, DiskError> {
        let mut taken = self.take_many(1, limit)?;
        Ok(taken.pop().expect("one was taken"))
    }

    /// Borrows `count` buffers at once, so that two callers that need several each never deadlock with half of theirs.
    ///
    /// # Errors
    /// [`DiskError::FewBuffers`] if the pool has fewer, [`DiskError::Deadline`] if they were not free in time.
    pub fn take_many(&self, count: usize, limit: Duration) -> Result<Vec<SwapBuffer>, DiskError> {
        if count > self.shared.count {
            return Err(DiskError::FewBuffers { needed: count, count: self.shared.count });
        }
        let start = Instant::now();
        let mut state = self.shared.state.lock();
        while state.free.len() < count {
            let waited = start.elapsed();
            if waited >= limit {
                let doing = format!("waiting for {count} of {} buffers ({} are free)", self.count(), state.free.len());
                return Err(DiskError::Deadline { doing, waited });
            }
            self.shared.returned.wait_for(&mut state, limit - waited);
        }
        Ok(self.lend(&mut state, count))
    }

    /// Borrows `count` buffers if that many are free.
    pub fn try_take_many(&self, count: usize) -> Option<Vec<SwapBuffer>> {
        let mut state = self.shared.state.lock();
        (state.free.len() >= count).then(|| self.lend(&mut state, count))
    }

    fn lend(&self, state: &mut State, count: usize) -> Vec<SwapBuffer> {
        let left = state.free.len() - count;
        let lent = state.free.split_off(left);
        state.peak = state.peak.max(self.shared.count - left);
        lent.into_iter().map(|index| self.buffer(index)).collect()
    }

    fn buffer(&self, index: usize) -> SwapBuffer {
        let bytes = self.shared.bytes;
        // SAFETY: the mapping has `count * bytes` bytes, and `index` is below `count`.
        let start = unsafe { self.shared.memory.start().add(index * bytes) };
        SwapBuffer { shared: self.shared.clone(), index, start, len: bytes }
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, bytes) = (self.count(), self.buffer_bytes());
        f.debug_struct("BufferPool").field("count", &count).field("bytes", &bytes).finish_non_exhaustive()
    }
}

/// A borrowed buffer, which returns to its pool when dropped. Its contents are still there when it is lent again.
pub struct SwapBuffer {
    shared: Arc<Arena>,
    index: usize,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a buffer is the only access to its bytes, like a box.
unsafe impl Send for SwapBuffer {}
// SAFETY: shared references only return shared references to bytes.
unsafe impl Sync for SwapBuffer {}

impl SwapBuffer {
    /// Returns the size of the buffer in bytes.
    pub fn capacity(&self) -> usize {
        self.shared.bytes
    }

    /// Returns the length of the views in bytes: the capacity at first, the region's length after a read.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the views are empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets the length of the views to the first `len` bytes.
    ///
    /// # Panics
    /// If that is more than [`SwapBuffer::capacity`].
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "a buffer of {} bytes cannot have length {len}", self.capacity());
        self.len = len;
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        self.view()
    }

    /// Returns the bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.view_mut()
    }

    /// Returns the bytes as numbers.
    ///
    /// # Panics
    /// If [`SwapBuffer::len`] is not a multiple of the numbers' size.
    pub fn view<T: Element>(&self) -> &[T] {
        let len = self.elements::<T>();
        // SAFETY: `len` numbers lie within the buffer, which starts on a page boundary and is mapped and so initialised; any bits are a
        // value of `T`; and nobody writes while `self` is borrowed, since the buffer is the only access to its bytes.
        unsafe { slice::from_raw_parts(self.start.as_ptr().cast(), len) }
    }

    /// Returns the bytes as numbers.
    ///
    /// # Panics
    /// If [`SwapBuffer::len`] is not a multiple of the numbers' size.
    pub fn view_mut<T: Element>(&mut self) -> &mut [T] {
        let len = self.elements::<T>();
        // SAFETY: as in `view`, and `self` is borrowed for this view alone.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().cast(), len) }
    }

    fn elements<T: Element>(&self) -> usize {
        const { assert!(align_of::<T>() <= 4096) };
        let size = size_of::<T>();
        assert!(
            self.len.is_multiple_of(size),
            "{} bytes are not a multiple of the element size of {size} bytes",
            self.len
        );
        self.len / size
    }

    /// Returns the address of the bytes, for a transfer that owns the buffer.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the alignment of the buffer's address and capacity.
    pub(crate) fn alignment(&self) -> usize {
        self.shared.alignment
    }
}

impl Drop for SwapBuffer {
    fn drop(&mut self) {
        self.shared.state.lock().free.push(self.index);
        // All waiters: one that waits for one buffer may be queued behind one that waits for several.
        self.shared.returned.notify_all();
    }
}

impl fmt::Debug for SwapBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapBuffer").field("index", &self.index).field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    fn pool(count: usize, bytes: usize) -> BufferPool {
        BufferPool::new(&PoolOptions { count, bytes, ..PoolOptions::default() }).unwrap()
    }

    #[test]
    fn buffers_are_aligned_apart_and_come_back() {
        let pool = pool(3, 5000);
        assert_eq!(pool.buffer_bytes(), 8192);
        let mut all = pool.take_many(3, SHORT).unwrap();
        for (fill, buffer) in all.iter_mut().enumerate() {
            assert_eq!(buffer.bytes().as_ptr().addr() % 4096, 0);
            buffer.bytes_mut().fill(fill as u8);
        }
        assert!(all.iter().enumerate().all(|(fill, buffer)| buffer.bytes().iter().all(|byte| *byte == fill as u8)));
        assert!(matches!(pool.take(SHORT), Err(DiskError::Deadline { .. })));
        drop(all);
        assert_eq!((pool.free(), pool.peak()), (3, 3));
    }

    #[test]
    fn taking_several_waits_until_all_are_there() {
        let pool = pool(2, 4096);
        let first = pool.take(SHORT).unwrap();
        let other = pool.clone();
        let both = std::thread::spawn(move || other.take_many(2, Duration::from_secs(20)).map(|taken| taken.len()));
        std::thread::sleep(SHORT);
        drop(first);
        assert_eq!(both.join().unwrap().unwrap(), 2);
        assert!(matches!(pool.take_many(3, SHORT), Err(DiskError::FewBuffers { needed: 3, count: 2 })));
    }

    #[test]
    fn views_are_of_whole_elements() {
        let pool = pool(1, 4096);
        let mut buffer = pool.take(SHORT).unwrap();
        buffer.set_len(12);
        buffer.view_mut::<f32>().copy_from_slice(&[1.0, 2.0, 3.0]);
        assert_eq!(buffer.bytes()[..4], 1.0_f32.to_ne_bytes());
        assert_eq!(buffer.view::<u16>().len(), 6);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| buffer.view::<f64>().len()));
        assert!(outcome.is_err());
    }

    #[test]
    fn a_pool_may_be_aligned_to_more_than_a_page() {
        let options =
            PoolOptions { count: 2, bytes: 1, alignment: 1 << 16, huge_pages: false, ..PoolOptions::default() };
        let pool = BufferPool::new(&options).unwrap();
        let buffers = pool.take_many(2, SHORT).unwrap();
        assert!(buffers.iter().all(|buffer| buffer.bytes().as_ptr().addr().is_multiple_of(1 << 16)));
    }

    #[test]
    fn pinned_memory_is_locked_if_this_user_may() {
        let locked = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap().trim().to_string();
            line.trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
        };
        let options = PoolOptions { count: 2, bytes: 1 << 20, pin_memory: true, ..PoolOptions::default() };
        let pool = BufferPool::new(&options).unwrap();
        assert!(locked() >= 2 << 20);
        drop(pool.take(SHORT).unwrap());
    }
}
