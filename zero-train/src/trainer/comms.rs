//! `comms_logger`: counts, sizes and times of a rank's collectives and gathers, from their spans.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::config::CommsLogger;
use crate::memory::format_bytes;

/// The operations of rank 0 since the start of a run.
#[derive(Debug, Clone)]
pub(super) struct CommsLog {
    settings: CommsLogger,
    /// Prefix of the names of the rank's threads. `None`: the process has one rank.
    threads: Option<&'static str>,
    sums: Arc<Mutex<BTreeMap<String, Sums>>>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Sums {
    calls: u64,
    bytes: u64,
    seconds: f64,
}

/// An operation that has begun.
struct Call {
    op: String,
    bytes: u64,
    begin: Instant,
}

impl CommsLog {
    /// Names of the spans that it needs.
    pub(super) const SPANS: [&str; 2] = ["collective", "gather"];

    /// Creates an empty log. `are_threads`: the ranks are threads of this process.
    pub(super) fn new(settings: CommsLogger, are_threads: bool) -> Self {
        Self { settings, threads: are_threads.then_some("rank-0"), sums: Arc::default() }
    }

    fn is_own_thread(&self) -> bool {
        let Some(prefix) = self.threads else { return true };
        let thread = std::thread::current();
        let rest = thread.name().and_then(|name| name.strip_prefix(prefix));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    }
}

impl Visit for Call {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "op" {
            self.op = value.to_string();
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "bytes" {
            self.bytes = value;
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for CommsLog {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if !self.is_own_thread() {
            return;
        }
        // A gather reads the shards of other ranks, who call nothing.
        let is_read = attributes.metadata().name() == "gather";
        let mut call = Call { op: "all-gather".into(), bytes: 0, begin: Instant::now() };
        attributes.record(&mut call);
        // Device collectives have their sizes in their names.
        call.op = call.op.split(" of ").next().unwrap_or_default().to_string();
        // A gather without bytes calls collectives, which are counted.
        if !self.settings.logs(&call.op) || is_read && call.bytes == 0 {
            return;
        }
        call.op += if is_read { " (one-sided)" } else { "" };
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(call);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(call) = span.extensions_mut().get_mut::<Call>()
        {
            values.record(call);
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(Call { op, bytes, begin }) = context.span(&id).and_then(|span| span.extensions_mut().remove()) else {
            return;
        };
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let of = sums.entry(op).or_default();
        *of =
            Sums { calls: of.calls + 1, bytes: of.bytes + bytes, seconds: of.seconds + begin.elapsed().as_secs_f64() };
    }
}

impl fmt::Display for CommsLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collectives of rank 0{:>20} {:>12} {:>12} {:>10} {:>12}", "calls", "size", "total", "mean", "rate")?;
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        for (op, Sums { calls, bytes, seconds }) in &*sums {
            let rate = format_bytes((*bytes as f64 / seconds.max(f64::MIN_POSITIVE)) as u64);
            write!(
                f,
                "\n  {op:<32} {calls:>7} {:>12} {:>10.1} ms {:>7.3} ms {rate:>10}/s",
                format_bytes(*bytes),
                seconds * 1e3,
                seconds * 1e3 / *calls as f64
            )?;
        }
        Ok(())
    }
}
