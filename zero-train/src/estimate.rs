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
        // Gradients follow the optimizer's state as soon as they are reduced, where each rank keeps its part.
        let (stay, go) = if stage.shards_gradients() { (0, g) } else { (g, 0) };
        if stage.shards_optimizer() {
            row(Offloaded::Optimizer, p + stay, o + go);
        }
        if stage.shards_parameters() {
            row(Offloaded::OptimizerAndParameters, stay + largest * precision.parameter, o + go + p);
        }
    }
    rows
}

/// What fits `memory` bytes of a machine with `ranks_here` ranks at stage 3, with the least on a disk: in words.
pub fn cheapest(rows: &[Estimate], ranks_here: u64, memory: u64) -> String {
    let mut sharded = rows.iter().filter(|row| row.stage.shards_parameters());
    let fits = sharded.find(|row| row.device * ranks_here <= memory);
    let memory = format_bytes(memory);
    let Some(row) = fits else {
        return format!(
            "Nothing fits {memory}, not even with all state on a disk: use more machines, or a smaller model."
        );
    };
    let (device, disk) = (format_bytes(row.device * ranks_here), format_bytes(row.host * ranks_here));
    let option = match row.offloaded {
        Offloaded::Nothing => {
            return format!("Cheapest that fits {memory}: stage 3, {device} of model state in memory.");
        }
        Offloaded::Optimizer => "optimizer",
        Offloaded::OptimizerAndParameters => "all",
    };
    format!(
        "Cheapest that fits {memory}: stage 3 with --offload {option}, {device} of model state in memory and {disk} on a disk."
    )
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
    fn the_least_on_a_disk_that_fits_is_named() {
        let rows = estimates(1_000_000_000, 80_000_000, 2, Precision::FP32_ADAMW);
        let gib = |gib: u64| cheapest(&rows, 2, gib << 30);
        assert!(gib(20).contains("stage 3, 14.90 GiB of model state in memory."), "{}", gib(20));
        assert!(
            gib(5).contains("--offload optimizer, 3.73 GiB of model state in memory and 11.18 GiB on a disk"),
            "{}",
            gib(10)
        );
        assert!(gib(3).contains("--offload all"), "{}", gib(3));
        assert!(gib(0).contains("Nothing fits 0 B"), "{}", gib(0));
    }

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
        2       optimizer                    1.86 GiB     3.26 GiB      20.49 GiB  yes
        3       nothing                      3.73 GiB          0 B      14.90 GiB  yes
        3       optimizer                  476.84 MiB     3.26 GiB      14.90 GiB  yes
        3       optimizer, parameters      152.59 MiB     3.73 GiB      15.50 GiB  yes
        Activations and buffers come on top. What is offloaded to a disk (--offload) takes no memory of this machine.
        ");
    }
}
