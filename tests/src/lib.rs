//! Integration tests: see `tests/tests`.
