//! Ports for ranks to meet on.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

/// One that nobody listens on, and another one each time: below those that the system gives to outgoing connections, of which
/// tests beside this one make many until the port is used.
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
