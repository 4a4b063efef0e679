//! Figures of a run's steps for its report.

use crate::metrics::StepMetrics;

/// Figures of the steps so far, in space that does not grow with their number.
#[derive(Debug, Clone, Default)]
pub(super) struct Steps {
    pub(super) number: usize,
    pub(super) skipped: usize,
    pub(super) loss_first: f64,
    pub(super) last: StepMetrics,
    pub(super) speeds: Speeds,
    /// Peaks over all ranks: gradients in flight, gathered parameters, memory of the process.
    pub(super) peaks: [u64; 3],
    /// Sum over the steps after the second, if all are known.
    pub(super) fresh_bytes: Option<u64>,
}

impl Steps {
    pub(super) fn add(&mut self, step: StepMetrics) {
        match self.number {
            0 => self.loss_first = step.loss,
            1 => self.speeds = Speeds::default(),
            2 => self.fresh_bytes = step.fresh_bytes,
            _ => self.fresh_bytes = self.fresh_bytes.zip(step.fresh_bytes).map(|(sum, more)| sum + more),
        }
        self.number += 1;
        self.skipped += usize::from(step.skipped);
        self.speeds.add(step.tokens_per_second);
        for rank in &step.ranks {
            let peaks = [rank.gradients_in_flight_bytes_peak, rank.gathered_bytes_peak, rank.peak_rss_bytes];
            self.peaks.iter_mut().zip(peaks).for_each(|(most, peak)| *most = peak.max(*most));
        }
        self.last = step;
    }
}

/// Speeds of evenly spaced steps, whose spacing grows so that their number stays bounded.
#[derive(Debug, Clone, Default)]
pub(super) struct Speeds {
    kept: Vec<f64>,
    /// One of every 2^`power` steps is kept; `seen` counts all of them.
    power: u32,
    seen: usize,
}

impl Speeds {
    const MOST: usize = 4096;

    fn add(&mut self, speed: f64) {
        if self.seen.is_multiple_of(1 << self.power) {
            self.kept.push(speed);
        }
        self.seen += 1;
        if self.kept.len() == Self::MOST {
            let mut at = 0..;
            self.kept.retain(|_| at.next().is_some_and(|at: usize| at.is_multiple_of(2)));
            self.power += 1;
        }
    }

    pub(super) fn median(&self) -> f64 {
        let mut speeds = self.kept.clone();
        speeds.sort_by(f64::total_cmp);
        speeds[speeds.len() / 2]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_many_steps_is_no_larger_than_one_of_few() {
        let (mut steps, mut few) = (Steps::default(), Steps::default());
        for at in 0..100_000usize {
            let rank = crate::metrics::RankMetrics { peak_rss_bytes: at as u64, ..Default::default() };
            let step = StepMetrics {
                loss: at as f64,
                // The first is slow.
                tokens_per_second: if at == 0 { 1.0 } else { 1000.0 + (at % 101) as f64 },
                skipped: at % 10 == 3,
                fresh_bytes: Some(1),
                ranks: vec![rank; 3],
                ..StepMetrics::default()
            };
            if at < 4 {
                few.add(step.clone());
            }
            steps.add(step);
        }
        assert!(steps.speeds.kept.capacity() <= 2 * Speeds::MOST, "{}", steps.speeds.kept.capacity());
        assert!((steps.speeds.median() - 1050.0).abs() < 3.0, "{}", steps.speeds.median());
        assert_eq!((steps.number, steps.skipped, steps.loss_first, steps.last.loss), (100_000, 10_000, 0.0, 99_999.0));
        assert_eq!((steps.peaks[2], steps.fresh_bytes), (99_999, Some(99_998)));
        assert_eq!((few.speeds.median(), few.fresh_bytes), (1002.0, Some(2)));
    }
}
