//! Failures of ranks that run as processes, over sockets: `cargo test -p zero-tests --test socket_faults`.

mod faults;
#[allow(dead_code)] // its other half is zero-core's
#[path = "../../zero-core/tests/process_common/mod.rs"]
mod process_common;

const LINK: process_common::LinkUnderTest = process_common::LinkUnderTest::Sockets;
