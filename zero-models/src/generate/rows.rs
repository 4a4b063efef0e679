//! The rows of a cache of keys and values: their lengths and padding, apart from the tensors.

use std::ops::Range;

use zero_core::config::Float;
use zero_kernels::options::MASKED;

/// Number of positions to allocate at first, if that many are expected.
const AT_FIRST: usize = 2048;

/// The rows of a cache of keys and values. Shorter rows are padded on the left. Each version of Burn has its own cache around it.
#[derive(Debug, Clone)]
pub struct CachedRows {
    length: usize,
    /// Number of positions that are expected in total.
    room: usize,
    /// Number of padding tokens before each row.
    padding: Vec<usize>,
    /// Number of positions that the model has.
    positions: usize,
    dtype: Option<Float>,
}

impl CachedRows {
    /// Creates rows that begin with `padding` padding tokens each. `room` is the expected total number of positions; beyond it the cache
    /// grows. Keys and values are stored as `dtype` if it is given: 16 bits halve the memory.
    pub fn new(padding: Vec<usize>, room: usize, dtype: Option<Float>) -> Self {
        Self { length: 0, room, padding, positions: usize::MAX, dtype }
    }

    /// Limits position numbers to a model's `positions`. Finished rows read on alongside others; their excess tokens are placed at the
    /// last position, and their results are unused.
    pub(super) fn within(self, positions: usize) -> Self {
        Self { positions, ..self }
    }

    /// Returns the number of positions that were read.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns `true` if nothing was read yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the type in which keys and values are stored; their own if `None`.
    pub fn dtype(&self) -> Option<Float> {
        self.dtype
    }

    /// Returns the length of each row's text after `t` more positions.
    pub fn reached(&self, t: usize) -> impl Iterator<Item = usize> {
        let end = self.length + t;
        self.padding.iter().map(move |padding| end.saturating_sub(*padding))
    }

    /// Returns `true` if `t` more positions make a text longer than `longest`: a model that rotates longer texts by other angles reads
    /// them again. The rows then begin anew.
    pub fn rereads(&mut self, t: usize, longest: usize) -> bool {
        let rereads = self.reached(t).any(|n| n > longest && n.saturating_sub(t) <= longest);
        if rereads {
            self.length = 0;
        }
        rereads
    }

    /// Returns the numbers of the next `t` positions in each row's text, row after row; 0 for padding.
    pub fn numbers(&self, t: usize) -> impl Iterator<Item = i32> {
        let next = self.length..self.length + t;
        let last = self.positions.saturating_sub(1);
        let own = move |&padding: &usize| next.clone().map(move |at| at.saturating_sub(padding).min(last) as i32);
        self.padding.iter().flat_map(own)
    }

    /// Returns the positions whose keys the last of `t` more positions attends to: all, or those in the window.
    pub fn keys(&self, t: usize, window: Option<usize>) -> Range<usize> {
        let end = self.length + t;
        end - window.unwrap_or(end).min(end)..end
    }

    /// Returns the number of positions to allocate for the first `t`. A window is moved to the front when it has reached the end.
    pub fn places(&self, t: usize, window: Option<usize>) -> usize {
        self.room.min(window.map_or(AT_FIRST, |window| 2 * window)).max(t)
    }

    /// Returns the padding mask of these key positions, `[b, keys]`, if they include padding.
    pub fn hidden(&self, keys: Range<usize>) -> Option<Vec<f32>> {
        if self.padding.iter().all(|&padding| padding <= keys.start) {
            return None;
        }
        let of = |&padding: &usize| keys.clone().map(move |at| if at < padding { MASKED as f32 } else { 0.0 });
        Some(self.padding.iter().flat_map(of).collect())
    }

    /// Ends a pass over `t` positions through all layers.
    pub fn advance(&mut self, t: usize) {
        self.length += t;
    }

    /// Replaces the rows: row `i` continues from row `rows[i]`.
    pub fn take(&mut self, rows: &[usize]) {
        self.padding = rows.iter().map(|&row| self.padding[row]).collect();
    }
}
