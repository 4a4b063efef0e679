//! The examples live in .
