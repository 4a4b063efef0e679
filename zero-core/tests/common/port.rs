//! Free ports for the rendezvous of ranks.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// Returns a port that nobody listens on, a different one each time. It is below the system's range for outgoing
/// connections, many of which concurrent tests open until the port is used.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add((std::process::id() as u16).wrapping_mul(61));
        let port = 10_000 + number % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
