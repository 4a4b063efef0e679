//! Statistics of many parser inputs, none of which may cause allocations of more than a few times its bytes.

use std::collections::BTreeMap;
use std::io::Write;

use zero_core::checkpoint::CheckpointError;

use crate::counting::Taken;

/// Most bytes allocated at one time, per byte of input.
const PEAK: usize = 16;
/// Largest allocation, per byte of input.
const LARGEST: usize = 10;
/// Most bytes allocated at one time for an empty input: paths, errors and the first buffers.
const SMALL_IN_ALL: usize = 8 << 10;
/// Largest allocation for an empty input.
pub const SMALL: usize = 4 << 10;

/// The outcome of inputs without an error.
pub const ACCEPTED: &str = "accepted";

/// Outcomes and allocations of many inputs.
#[derive(Default)]
pub struct Tally {
    outcomes: BTreeMap<String, usize>,
    /// Smallest input, in bytes, that counts for the ratios below.
    counted_from: usize,
    /// Largest allocation, and the most allocated at one time, per byte of input.
    largest: f64,
    peak: f64,
}

impl Tally {
    /// Creates an empty tally that counts allocations per byte for inputs of at least this size.
    pub fn counting_from(counted_from: usize) -> Self {
        Self { counted_from, ..Self::default() }
    }

    /// Checks the bound for one input of `json` bytes.
    pub fn add(&mut self, outcome: &str, json: usize, taken: Taken) {
        *self.outcomes.entry(outcome.to_string()).or_default() += 1;
        let Taken { peak, largest } = taken;
        assert!(largest <= (LARGEST * json).max(SMALL), "{largest} bytes at once for {json} bytes: {outcome}");
        assert!(peak <= PEAK * json + SMALL_IN_ALL, "{peak} bytes for {json} bytes: {outcome}");
        if json >= self.counted_from {
            self.largest = self.largest.max(largest as f64 / json as f64);
            self.peak = self.peak.max(peak as f64 / json as f64);
        }
    }

    /// Prints without a macro, whose output the test harness captures.
    pub fn print(&self, what: &str) {
        let cases: usize = self.outcomes.values().sum();
        let accepted = self.outcomes.get(ACCEPTED).copied().unwrap_or(0);
        let (refused, reasons) =
            (cases - accepted, self.outcomes.keys().filter(|outcome| *outcome != ACCEPTED).count());
        let Self { counted_from, largest, peak, .. } = self;
        writeln!(
            std::io::stderr().lock(),
            "{cases} {what}: {accepted} accepted, {refused} refused for {reasons} reasons; of {counted_from} bytes and \
             more, at most {largest:.2} bytes a byte in one allocation and {peak:.2} in all"
        )
        .unwrap();
    }
}

/// Returns the kind of an error and, for headers and manifests, the first words of the reason.
pub fn outcome<T>(result: &Result<T, CheckpointError>) -> String {
    let reason = |of: &str, reason: &str| {
        let words: Vec<&str> = reason.split(' ').filter(|word| word.chars().all(char::is_alphabetic)).take(3).collect();
        format!("{of} ({})", words.join(" "))
    };
    match result {
        Ok(_) => ACCEPTED.to_string(),
        Err(CheckpointError::BadHeader { reason: why, .. }) => reason("header", why),
        Err(CheckpointError::BadManifest { reason: why, .. }) => reason("manifest", why),
        Err(CheckpointError::Swapped { .. }) => "swapped".to_string(),
        Err(CheckpointError::Missing { .. }) => "missing".to_string(),
        Err(CheckpointError::Truncated { .. } | CheckpointError::TooLong { .. }) => "size".to_string(),
        Err(CheckpointError::NewerFormat { .. }) => "newer".to_string(),
        Err(other) => format!("{other:?}").split(' ').next().unwrap_or_default().to_string(),
    }
}
