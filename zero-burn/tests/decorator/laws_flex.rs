//! The suite of laws over burn-flex.

use crate::laws;

laws!(burn_flex::Flex);
