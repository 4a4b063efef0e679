//! `--trace`: writes the spans of all threads to a file for chrome://tracing or <https://ui.perfetto.dev>.
//!
//! Compute threads show forward, backward and update, the operations inside, and their waits; `prefetch`, `reducer` and
//! `gradients` threads show the concurrent communication. `bench/trace.py` adds it up.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use tracing_chrome::{ChromeLayerBuilder, FlushGuard};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;

use super::comms::CommsLog;
use crate::error::{Result, TrainError, io};

/// Records spans to a file, until the guard is dropped, which completes it; and operations to a log.
pub(super) fn begin(path: Option<&Path>, comms: Option<CommsLog>) -> Result<Option<FlushGuard>> {
    if path.is_none() && comms.is_none() {
        return Ok(None);
    }
    let chrome = |path| {
        let file = File::create(path).map_err(io("create", path))?;
        Ok::<_, TrainError>(ChromeLayerBuilder::new().writer(BufWriter::new(file)).include_args(true).build())
    };
    let (layer, guard) = path.map(chrome).transpose()?.unzip();
    // Without the filter every span of a step would be made for it.
    let comms = comms.map(|log| log.with_filter(filter_fn(|span| CommsLog::SPANS.contains(&span.name()))));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(comms).with(layer)).map_err(|_| {
        let problem =
            "--trace and comms_logger cannot record: this program already has a tracing subscriber; use that one";
        TrainError::Run(problem.into())
    })?;
    Ok(guard)
}
