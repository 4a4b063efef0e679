//! The engine of processes over sockets: `cargo test -p zero-core --test process_engine`.

mod process_cases;
mod process_common;

const LINK: process_common::LinkUnderTest = process_common::LinkUnderTest::Sockets;
