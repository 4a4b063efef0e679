//! Counts of rows that were left out, cut, or have an answer without text, for warnings.

/// Rows that were left out, cut, or have an answer without text.
#[derive(Debug, Clone, Default)]
pub struct LeftOut {
    /// Number of rows that were read.
    pub read: usize,
    /// Rows that were left out because none of their tokens has a label.
    pub without_labels: Noted,
    /// Rows of which only the first tokens were kept.
    pub cut: Noted,
    /// Rows that are used although an answer has no text: the model learns to end its turn.
    pub empty: Noted,
    /// Rows that were skipped because they cannot be used, with their problems.
    pub bad: Noted,
}

/// Rows of one kind.
#[derive(Debug, Clone, Default)]
pub struct Noted {
    /// Number of rows.
    pub number: usize,
    /// The first of them, such as "line 3".
    pub first: Vec<String>,
}

impl Noted {
    pub(super) fn add(&mut self, row: impl FnOnce() -> String) {
        self.number += 1;
        if self.first.len() < NOTED {
            self.first.push(row());
        }
    }
}

impl core::fmt::Display for Noted {
    /// Lists the first rows.
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let more = if self.number > self.first.len() { " and others" } else { "" };
        write!(f, "{}{more}", self.first.join(", "))
    }
}

/// Number of rows that a [`Noted`] lists.
const NOTED: usize = 10;
