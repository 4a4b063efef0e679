//! Where the time of a step goes (`wall_clock_breakdown`).
//!
//! * In: start and stop of named timers, or durations measured elsewhere, and the end of each step.
//! * Out: [`StepTimes`], of each step and, every `steps_per_print` steps, the mean over the steps since the last one.
//!   They print as one line.
//! * Threads: a plain value of one thread. It measures wall-clock time of the host: a device that works asynchronously
//!   must be waited for before a stop, or its time shows up in a later timer. Timers may overlap.

use std::fmt;
use std::time::{Duration, Instant};

use super::MonitorError;

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// Reading the batch.
    Data,
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Waiting for reduced gradients.
    Reduce,
    /// The optimizer's step.
    Step,
}

impl Timer {
    /// All timers, in the order in which they are printed.
    pub const ALL: [Timer; 5] = [Timer::Data, Timer::Forward, Timer::Backward, Timer::Reduce, Timer::Step];
}

impl fmt::Display for Timer {
    /// The name in the printed line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Timer::Data => "data",
            Timer::Forward => "forward",
            Timer::Backward => "backward",
            Timer::Reduce => "reduce",
            Timer::Step => "step",
        })
    }
}

/// Time by timer, of one step or as a mean. Prints as `step 10 | forward 12.3 ms | backward 25.1 ms`, without the
/// timers that never ran, and with `(mean of N)` after the step's number if it is the mean of several.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTimes {
    /// The step's number; of a mean, the last step's.
    pub step: usize,
    /// How many steps these are the mean of.
    pub steps: usize,
    total: [Option<Duration>; Timer::ALL.len()],
}

impl StepTimes {
    /// Milliseconds a step, `None` if the timer never ran.
    pub fn ms(&self, timer: Timer) -> Option<f64> {
        self.total[timer as usize].map(|total| total.as_secs_f64() * 1e3 / self.steps.max(1) as f64)
    }
}

impl fmt::Display for StepTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}", self.step)?;
        if self.steps > 1 {
            write!(f, " (mean of {})", self.steps)?;
        }
        for timer in Timer::ALL {
            if let Some(ms) = self.ms(timer) {
                write!(f, " | {timer} {ms:.1} ms")?;
            }
        }
        Ok(())
    }
}

/// Accumulates the timers of a step, and of the steps between two prints.
#[derive(Debug, Default)]
pub struct WallClock {
    steps_per_print: usize,
    started: [Option<Instant>; Timer::ALL.len()],
    step: [Option<Duration>; Timer::ALL.len()],
    window: [Option<Duration>; Timer::ALL.len()],
    window_steps: usize,
}

impl WallClock {
    /// A clock that gives a mean at every step divisible by `steps_per_print`; 0 for never.
    pub fn new(steps_per_print: usize) -> Self {
        Self { steps_per_print, ..Self::default() }
    }

    /// Starts a timer. It may run several times in a step, as for micro-batches; the times add up.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Timer`] if it runs already; it goes on from its first start.
    pub fn start(&mut self, timer: Timer) -> Result<(), MonitorError> {
        let started = &mut self.started[timer as usize];
        if started.is_some() {
            return Err(MonitorError::Timer { timer, problem: "is started while it runs" });
        }
        *started = Some(Instant::now());
        Ok(())
    }

    /// Stops a timer and adds its time to the step.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Timer`] if it does not run.
    pub fn stop(&mut self, timer: Timer) -> Result<(), MonitorError> {
        let Some(started) = self.started[timer as usize].take() else {
            return Err(MonitorError::Timer { timer, problem: "is stopped but was not started" });
        };
        self.add(timer, started.elapsed());
        Ok(())
    }

    /// Times a function.
    pub fn time<T>(&mut self, timer: Timer, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = work();
        self.add(timer, started.elapsed());
        result
    }

    /// Adds a time measured elsewhere to the step.
    pub fn add(&mut self, timer: Timer, time: Duration) {
        add(&mut self.step[timer as usize], time);
    }

    /// Ends step `step` (from 1) and gives its times, and the mean since the last one if it is to be printed now. The
    /// mean divides by the number of steps, also for a timer that ran only in some of them.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Timer`] if a timer still runs. That timer's time is lost; the step is not ended, so that a
    /// second call ends it without.
    pub fn end_step(&mut self, step: usize) -> Result<(StepTimes, Option<StepTimes>), MonitorError> {
        for timer in Timer::ALL {
            if self.started[timer as usize].take().is_some() {
                return Err(MonitorError::Timer { timer, problem: "still runs at the end of the step" });
            }
        }
        let times = StepTimes { step, steps: 1, total: std::mem::take(&mut self.step) };
        for (window, time) in self.window.iter_mut().zip(times.total) {
            if let Some(time) = time {
                add(window, time);
            }
        }
        self.window_steps += 1;
        let print = self.steps_per_print > 0 && step.is_multiple_of(self.steps_per_print);
        let mean = print.then(|| StepTimes {
            step,
            steps: std::mem::take(&mut self.window_steps),
            total: std::mem::take(&mut self.window),
        });
        Ok((times, mean))
    }
}

fn add(sum: &mut Option<Duration>, time: Duration) {
    *sum = Some(sum.unwrap_or_default().saturating_add(time));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn steps_and_means_are_lines() {
        let mut clock = WallClock::new(2);
        clock.add(Timer::Backward, ms(20));
        clock.add(Timer::Forward, ms(5));
        clock.add(Timer::Forward, ms(7));
        let (times, mean) = clock.end_step(9).unwrap();
        assert_eq!(times.to_string(), "step 9 | forward 12.0 ms | backward 20.0 ms");
        assert_eq!(mean, None);
        clock.add(Timer::Forward, ms(13));
        clock.add(Timer::Step, ms(3));
        let (times, mean) = clock.end_step(10).unwrap();
        assert_eq!(times.to_string(), "step 10 | forward 13.0 ms | step 3.0 ms");
        let told = "step 10 (mean of 2) | forward 12.5 ms | backward 10.0 ms | step 1.5 ms";
        assert_eq!(mean.unwrap().to_string(), told);
        let (times, mean) = clock.end_step(12).unwrap();
        assert_eq!((times.to_string().as_str(), times.ms(Timer::Data)), ("step 12", None));
        assert_eq!(mean.unwrap().to_string(), "step 12");
    }

    #[test]
    fn timers_measure() {
        let mut clock = WallClock::new(0);
        clock.start(Timer::Data).unwrap();
        assert_eq!(clock.time(Timer::Reduce, || 7), 7);
        std::thread::sleep(ms(3));
        clock.stop(Timer::Data).unwrap();
        let (times, mean) = clock.end_step(4).unwrap();
        assert!(times.ms(Timer::Data).unwrap() >= 3.0 && times.ms(Timer::Reduce).is_some());
        assert_eq!(mean, None);
    }

    #[test]
    fn unpaired_calls_are_errors() {
        let mut clock = WallClock::new(1);
        let error = clock.stop(Timer::Forward).unwrap_err().to_string();
        assert!(error.starts_with("the timer \"forward\" is stopped but was not started; "), "{error}");
        clock.start(Timer::Forward).unwrap();
        assert!(clock.start(Timer::Forward).is_err());
        assert!(clock.end_step(1).unwrap_err().to_string().contains("still runs"));
        assert_eq!(clock.end_step(1).unwrap().0.to_string(), "step 1");
    }
}
