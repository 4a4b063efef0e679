//! `zero estimate`: bytes per rank of a model's state at every stage and with every offload, by the ZeRO formulas, and the
//! cheapest that fits this machine.

use std::fmt::Write;

use zero_core::Stage;
use zero_core::accounting::StateBytes;
use zero_core::estimate::{Precision, model_state};
use zero_kernels::quantized::Format;

use crate::memory::format_bytes;

/// The model state that is offloaded from the device.
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
    /// The offloaded state.
    pub offloaded: Offloaded,
    /// Model state on the device.
    pub device: u64,
    /// Model state in host memory.
    pub host: u64,
}

impl Estimate {
    /// Returns the sum of device and host memory.
    pub fn total(&self) -> u64 {
        self.device + self.host
    }
}

/// Returns a row for every stage and offload, for `parameters` parameters, the largest of `largest` elements, over `ranks` ranks.
///
/// If parameters are offloaded, the device holds one gathered parameter at a time, the largest at most.
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

/// Describes the stage 3 row that fits `memory` bytes of a machine with `ranks_here` ranks and has the least on a disk.
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
            return format!("Least offload that fits {memory}: stage 3, {device} of model state in memory.");
        }
        Offloaded::Optimizer => "optimizer",
        Offloaded::OptimizerAndParameters => "all",
    };
    format!(
        "Least offload that fits {memory}: stage 3 with --offload {option}, {device} of model state in memory and {disk} on a disk."
    )
}

/// A model by its name, with its number of parameters and the elements of the largest one.
pub type NamedModel = (String, u64, u64);

/// Describes which of these models fit `memory` bytes of a machine with `ranks_here` of `ranks` ranks at stage 3: the largest one for each
/// kind of offload to a disk.
pub fn largest(models: &[NamedModel], ranks: u64, ranks_here: u64, precision: Precision, memory: u64) -> String {
    let mut models = models.to_vec();
    models.sort_by_key(|(_, parameters, _)| *parameters);
    let limit = format_bytes(memory);
    let mut text = format!(
        "{:<32} {:<16} {:>16} {:>12} {:>12}",
        "largest model at stage 3", "", "parameters", "in memory", "on a disk"
    );
    let ways = [
        (Offloaded::Nothing, "no offload"),
        (Offloaded::Optimizer, "--offload optimizer"),
        (Offloaded::OptimizerAndParameters, "--offload all"),
    ];
    for (offloaded, option) in ways {
        let fitting = models.iter().rev().find_map(|(name, parameters, largest)| {
            let rows = estimates(*parameters, *largest, ranks, precision);
            let row = rows.into_iter().find(|row| row.stage.shards_parameters() && row.offloaded == offloaded)?;
            (row.device * ranks_here <= memory).then_some((name, parameters, row))
        });
        // Writing to a string cannot fail.
        let _ = match fitting {
            None => write!(text, "\n{option:<32} none fits {limit}"),
            Some((name, parameters, row)) => write!(
                text,
                "\n{option:<32} {name:<16} {parameters:>16} {:>12} {:>12}",
                format_bytes(row.device * ranks_here),
                format_bytes(row.host * ranks_here)
            ),
        };
    }
    text + "\nActivations and buffers are not included; `zero train --model NAME --dry-run` includes them."
}

/// Formats the table, and says which rows fit `available` bytes when `ranks_here` ranks run on this machine and device and
/// host share one memory.
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
    text.push_str(
        "\nActivations and buffers are not included. State offloaded to a disk (--offload) takes no memory of this \
         machine.",
    );
    text
}

/// Bandwidths, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// To a machine from the others, in each direction; its ranks share it.
    pub across: f64,
    /// To a rank from the others of its machine.
    pub within: f64,
}

/// A layout of stage 3 over machines, with bytes per rank for a step of one micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    /// Options of `zero train` besides `--stage 3`.
    pub options: String,
    /// Model state.
    pub memory: u64,
    /// Received from ranks of other machines.
    pub across: u64,
    /// Received from ranks of its own machine.
    pub within: u64,
    /// Time of both transfers, one after the other.
    pub seconds: f64,
}

/// Returns every layout of stage 3 over `nodes` machines with `here` ranks each. Either all ranks shard, without or with a
/// secondary shard on each machine (hpZ), or only those of a machine (MiCS). Each comes unquantised, with quantised
/// gradients (qgZ), and with quantised weights (qwZ) too.
pub fn layouts(parameters: u64, here: u64, nodes: u64, precision: Precision, links: Links) -> Vec<Layout> {
    let (whole, sent) = (precision.parameter * parameters, precision.gradient * parameters);
    let int8 = Format::Int8.bytes(parameters as usize) as u64;
    // Of what all ranks have between them, a rank has this from other machines, and this from its own.
    let of_all = |bytes: u64| (bytes * (nodes - 1) / nodes, bytes * (here - 1) / (here * nodes));
    let of_machine = |bytes: u64| bytes * (here - 1) / here;
    let mut laid = Vec::new();
    for (option, shards) in [
        (String::new(), here * nodes),
        (format!("--secondary-shard-size {here}"), here * nodes),
        (format!("--shard-size {here}"), here),
    ] {
        let (is_mics, is_hpz) = (shards == here, option.starts_with("--secondary"));
        for (quantised, gradients, weights) in [
            ("", None, None),
            ("--quantized-gradients int8", Some(int8), None),
            ("--quantized-gradients int8 --quantized-weights int8", Some(int8), Some(int8)),
        ] {
            let used = weights.unwrap_or(whole);
            let (gathers_across, gathers_within) = match (is_mics, is_hpz) {
                (true, _) => (0, 2 * of_machine(used)),
                // A version crosses once, and is gathered twice from what has come.
                (_, true) => (of_all(used).0 / here, 2 * of_machine(whole)),
                _ => (of_all(2 * used).0, of_all(2 * used).1),
            };
            let (sums_across, sums_within) = match (is_mics, is_hpz, gradients) {
                // What a rank keeps of a sum within its machine goes to the others and comes back.
                (true, ..) => (2 * of_all(gradients.unwrap_or(sent) / here).0, of_machine(sent)),
                (_, true, Some(bytes)) => (of_all(bytes / here).0, of_machine(sent)),
                (.., gradients) => of_all(gradients.unwrap_or(sent)),
            };
            let codes = weights.map_or(0, |bytes| bytes / shards);
            let memory = model_state(parameters, Stage::Parameters, shards, precision).total() + codes;
            let memory = memory + if is_hpz { whole / here } else { 0 };
            let (across, within) = (gathers_across + sums_across, gathers_within + sums_within);
            let seconds = (across * here) as f64 / links.across + within as f64 / links.within;
            let options =
                [&*option, quantised].into_iter().filter(|words| !words.is_empty()).collect::<Vec<_>>().join(" ");
            laid.push(Layout { options, memory, across, within, seconds });
        }
    }
    laid
}

/// Formats the table of [`layouts`], and names the fastest that fits `memory` bytes of a rank: first among the unquantised
/// ones, then among all.
pub fn layouts_table(laid: &[Layout], memory: Option<u64>) -> String {
    let mut text = format!(
        "{:<74} {:>12} {:>12} {:>12} {:>8}",
        "stage 3 on several machines, per rank and step", "memory", "across", "within", "seconds"
    );
    for Layout { options, memory, across, within, seconds } in laid {
        let options = if options.is_empty() { "all ranks shard" } else { options };
        let [memory, across, within] = [memory, across, within].map(|bytes| format_bytes(*bytes));
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{options:<74} {memory:>12} {across:>12} {within:>12} {seconds:>8.3}");
    }
    let fits = laid.iter().filter(|laid| memory.is_none_or(|memory| laid.memory <= memory));
    let least = |only_exact: bool| {
        let fits = fits.clone().filter(|laid| !only_exact || !laid.options.contains("quantized"));
        fits.min_by(|a, b| a.seconds.total_cmp(&b.seconds))
    };
    let named = |laid: &Layout| format!("--stage 3 {}", laid.options).trim_end().to_string();
    text += &match (least(true), least(false)) {
        (None, _) => "\nNone fits a rank's memory: offload, or use more machines.".to_string(),
        (Some(exact), Some(any)) if any.seconds < exact.seconds => format!(
            "\nShortest network time that fits: {} ({:.3} s); with slightly different training results: {} ({:.3} s).",
            named(exact),
            exact.seconds,
            named(any),
            any.seconds
        ),
        (Some(exact), _) => format!("\nShortest network time that fits: {} ({:.3} s).", named(exact), exact.seconds),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the bytes that the trainer's own plan says a rank receives; other tests check that against measured bytes.
    #[test]
    fn layouts_receive_what_their_plans_say() {
        let precision = Precision { parameter: 2, gradient: 2, optimizer: 12 };
        let links = Links { across: 1e9, within: 1e10 };
        let laid = layouts(1_000_000_000, 4, 2, precision, links);
        let of = |options: &str| laid.iter().find(|laid| laid.options == options).unwrap().clone();
        let (flat, hpz, mics) = (of(""), of("--secondary-shard-size 4"), of("--shard-size 4"));
        // 2 GB of parameters, over 8 ranks, twice, and as many of gradients once.
        assert_eq!((flat.across, flat.within), (3_000_000_000, 2_250_000_000));
        assert_eq!((hpz.across, hpz.within), (250_000_000 + 1_000_000_000, 3_000_000_000 + 750_000_000));
        assert_eq!((mics.across, mics.within), (500_000_000, 4_500_000_000));
        assert_eq!((flat.memory, hpz.memory, mics.memory), (2_000_000_000, 2_500_000_000, 4_000_000_000));
        assert_eq!(flat.seconds, 12.0 + 0.225);
        assert_eq!(of("--shard-size 4 --quantized-gradients int8").across, 265_625_000);
        assert!(layouts_table(&laid, None).contains("fits: --stage 3 --shard-size 4 (2.450 s); with slightly"));
        assert!(
            layouts_table(&laid, Some(3_000_000_000)).contains("fits: --stage 3 --secondary-shard-size 4 (5.375 s)")
        );
        assert!(layouts_table(&laid, Some(2_000_000_000)).contains("fits: --stage 3 (12.225 s); with"));
        assert!(layouts_table(&laid, Some(1)).ends_with("None fits a rank's memory: offload, or use more machines."));
        // Slow memory, and a fast link between machines.
        let laid = layouts(1_000_000_000, 4, 2, precision, Links { across: 1e12, within: 1e9 });
        assert!(layouts_table(&laid, None).contains("fits: --stage 3 (2.262 s)"), "{}", layouts_table(&laid, None));
    }

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
        Activations and buffers are not included. State offloaded to a disk (--offload) takes no memory of this machine.
        ");
    }
}
