//! Helpers shared by the tests.
#![allow(dead_code, reason = "each test program uses a part")]

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, span};
use zero_core::offload::{AioOptions, BufferPool, EngineChoice, PoolOptions, SwapDir, SwapFile, SwapFileOptions};

/// Longer than any wait of a passing test.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A folder with one file in it.
pub struct Setup {
    pub file: SwapFile,
    pub dir: SwapDir,
    pub parent: tempfile::TempDir,
}

pub fn setup(options: &SwapFileOptions) -> Setup {
    let parent = tempfile::tempdir().unwrap();
    let dir = SwapDir::open(parent.path()).unwrap();
    Setup { file: dir.create_file(0, options).unwrap(), dir, parent }
}

pub fn pool(count: usize, bytes: usize) -> BufferPool {
    BufferPool::new(&PoolOptions { count, bytes, ..PoolOptions::default() }).unwrap()
}

/// Returns every I/O method that this machine has. A container may refuse io_uring; the first then equals the second.
pub fn ways() -> [(&'static str, EngineChoice, bool); 4] {
    let probe = tempfile::tempdir().unwrap();
    let options = SwapFileOptions { engine: EngineChoice::IoUring, ..SwapFileOptions::default() };
    let uring = match SwapDir::open(probe.path()).unwrap().create_file(0, &options) {
        Ok(_) => EngineChoice::IoUring,
        Err(error) => {
            eprintln!("without io_uring: {error}");
            EngineChoice::Threads
        }
    };
    [
        ("io_uring", uring, true),
        ("threads", EngineChoice::Threads, true),
        ("threads, buffered", EngineChoice::Threads, false),
        ("io_uring, buffered", uring, false),
    ]
}

pub fn small_blocks(engine: EngineChoice, direct: bool) -> SwapFileOptions {
    let aio = AioOptions { block_size: 16 << 10, queue_depth: 4, ..AioOptions::default() };
    SwapFileOptions { aio, engine, direct }
}

/// The messages logged by a test's thread.
#[derive(Clone, Default)]
pub struct Log {
    messages: Arc<Mutex<Vec<String>>>,
}

impl Log {
    /// Returns the result of `body`, and the messages that it logs on this thread.
    pub fn of<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
        let log = Log::default();
        let outcome = tracing::subscriber::with_default(log.clone(), body);
        let messages = log.messages.lock().unwrap().clone();
        (outcome, messages)
    }
}

impl tracing::Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.messages.lock().unwrap().push(format!("{}: {}", event.metadata().level(), text.0));
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
