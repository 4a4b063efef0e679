//! `zero estimate`: bytes per rank of a model's state at every stage and with every offload, by the ZeRO formulas, and what
//! fits into this machine.

use std::fmt::Write;

use zero_core::Stage;
use zero_core::accounting::StateBytes;
use zero_core::estimate::{Precision, model_state};

use crate::memory::format_bytes;

/// What is moved off the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Offloaded {
    /// Nothing.
    Nothing,
    /// Optimizer state.
    Optimizer,
    /// Optimizer state and parameters (stage 3).
    OptimizerAndParameters,
}

/// One row of the table: bytes of one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// ZeRO stage.
    pub stage: Stage,
    /// What is offloaded.
    pub offloaded: Offloaded,
    /// Model state on the device.
    pub device: u64,
    /// Model state in host memory.
    pub host: u64,
}

impl Estimate {
    /// Both.
    pub fn total(&self) -> u64 {
        self.device + self.host
    }
}

/// Every stage and offload for `parameters` parameters, the largest of `largest` elements, over `ranks` ranks.
///
/// Where parameters are offloaded, the device holds one gathered parameter at a time, the largest at most.
pub fn estimates(parameters: u64, largest: u64, ranks: u64, precision: Precision) -> Vec<Estimate> {
    let mut rows = Vec::new();
    for stage in Stage::ALL {
        let StateBytes { parameters: p, gradients: g, optimizer: o } = model_state(parameters, stage, ranks, precision);
        let mut row = |offloaded, device, host| rows.push(Estimate { stage, offloaded, device, host });
        row(Offloaded::Nothing, p + g + o, 0);
        if stage.shards_optimizer() {
            row(Offloaded::Optimizer, p + g, o);
        }
        if stage.shards_parameters() {
            row(Offloaded::OptimizerAndParameters, g + largest * precision.parameter, o + p);
        }
    }
    rows
}

/// The table, and which rows fit `available` bytes when `ranks_here` ranks run on this machine, where device and host are
/// one memory.
pub fn table(rows: &[Estimate], ranks_here: u64, available: Option<u64>) -> String {
    let mut text =
        format!("{:<7} {:<24} {:>12} {:>12} {:>14}", "stage", "offloaded", "device/rank", "host/rank", "this machine");
    if available.is_some() {
        text.push_str("  fits");
    }
    for row in rows {
        let offloaded = match row.offloaded {
            Offloaded::Nothing => "nothing",
            Offloaded::Optimizer => "optimizer",
            Offloaded::OptimizerAndParameters => "optimizer, parameters",
        };
        let here = row.total() * ranks_here;
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "\n{:<7} {offloaded:<24} {:>12} {:>12} {:>14}",
            row.stage.to_string(),
            format_bytes(row.device),
            format_bytes(row.host),
            format_bytes(here)
        );
        if let Some(available) = available {
            let _ = write!(text, "  {}", if here <= available { "yes" } else { "no" });
        }
    }
    text.push_str("\nActivations and buffers come on top. What is offloaded to a disk (--offload) takes no memory of this machine.");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_a_billion() {
        let rows = estimates(1_000_000_000, 80_000_000, 4, Precision::MIXED_ADAMW);
        assert_eq!(rows.len(), 4 + 3 + 1);
        insta::assert_snapshot!(table(&rows, 4, Some(40_000_000_000)), @"
        stage   offloaded                 device/rank    host/rank   this machine  fits
        0       nothing                     14.90 GiB          0 B      59.60 GiB  no
        1       nothing                      6.52 GiB          0 B      26.08 GiB  yes
        1       optimizer                    3.73 GiB     2.79 GiB      26.08 GiB  yes
        2       nothing                      5.12 GiB          0 B      20.49 GiB  yes
        2       optimizer                    2.33 GiB     2.79 GiB      20.49 GiB  yes
        3       nothing                      3.73 GiB          0 B      14.90 GiB  yes
        3       optimizer                  953.67 MiB     2.79 GiB      14.90 GiB  yes
        3       optimizer, parameters      629.43 MiB     3.26 GiB      15.50 GiB  yes
        Activations and buffers come on top. What is offloaded to a disk (--offload) takes no memory of this machine.
        ");
    }
}
