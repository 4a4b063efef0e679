//! The suite of laws over burn-flex.

mod suite;

laws!(burn_flex::Flex);
