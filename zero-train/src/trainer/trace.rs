//! `--trace`: writes the spans of all threads to a file for chrome://tracing or <https://ui.perfetto.dev>.
//!
//! Compute threads show forward, backward and update, the operations inside, and their waits; `prefetch`, `reducer` and
//! `gradients` threads show the concurrent communication. `bench/trace.py` adds it up.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::layer::SubscriberExt;

use crate::error::{Result, TrainError, io};

/// Records spans until the guard is dropped, which completes the file.
pub(super) fn begin(path: &Path) -> Result<FlushGuard> {
    let file = File::create(path).map_err(io("create", path))?;
    let (layer, guard) = ChromeLayerBuilder::new().writer(BufWriter::new(file)).include_args(true).build();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).map_err(|_| {
        TrainError::Run("--trace cannot record: this program already has a tracing subscriber; use that one".into())
    })?;
    Ok(guard)
}
