//! Comparison of the records of several ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{Operation, Record};
use crate::files;

/// Maximum size of a record in bytes: far more than its operations need if each lists a million ranks.
const LARGEST_RECORD: u64 = 1 << 30;

/// A record that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// It cannot be read.
    #[error("{}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not a record.
    #[error("{} is not a flight record: {source}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The parse error.
        source: serde_json::Error,
    },
}

/// A rank that others wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Late {
    /// The rank.
    pub rank: usize,
    /// Label of the group in which it is waited for.
    pub group: String,
    /// The sequence number that it has not reached.
    pub seq: u64,
    /// Description of that operation, as recorded by the waiting ranks.
    pub op: String,
    /// The waiting ranks.
    pub waited_for_by: Vec<usize>,
    /// The last operation that it completed in this group, if it left a record.
    pub last_completed: Option<u64>,
    /// The operation that it was waiting in instead, if it left a record with one.
    pub doing: Option<String>,
    /// `true` if it left a record.
    pub recorded: bool,
}

/// One operation that was waiting when its rank's record was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// The rank that waits.
    pub rank: usize,
    /// Label of the group.
    pub group: String,
    /// Sequence number.
    pub seq: u64,
    /// The operation.
    pub op: String,
    /// The ranks it waits for.
    pub for_ranks: Vec<usize>,
}

/// Two ranks that called different operations at the same sequence number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Different {
    /// Label of the group.
    pub group: String,
    /// Sequence number.
    pub seq: u64,
    /// Each operation with the ranks that called it.
    pub called: Vec<(String, Vec<usize>)>,
}

/// Progress of the ranks in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completed {
    /// Label of the group.
    pub group: String,
    /// Each rank that left a record, with the last operation that it completed.
    pub ranks: Vec<(usize, Option<u64>)>,
}

/// An operation: the identity and the label of its group, and its number there.
type OpKey = (u64, String, u64);

/// Result of comparing the ranks' records.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// Number of ranks.
    pub world: usize,
    /// Ranks without a record: dead, stopped, or cut off.
    pub without_record: Vec<usize>,
    /// Ranks that others wait for and that have not reached that operation themselves, worst first.
    pub late: Vec<Late>,
    /// All operations that were waiting.
    pub waits: Vec<Wait>,
    /// Sequence numbers at which ranks disagree.
    pub mismatches: Vec<Different>,
    /// Progress of each group.
    pub completed: Vec<Completed>,
    /// Each record's rank and reason.
    pub reasons: Vec<(usize, String)>,
}

/// Reads records and reports which ranks are late, and in which operations.
///
/// # Errors
///
/// [`Unreadable`] for the first file that is not a valid record.
pub fn merge<P: AsRef<Path>>(files: &[P]) -> Result<Report, Unreadable> {
    let mut records = Vec::new();
    for path in files {
        let path = path.as_ref();
        let bytes = files::read(path, LARGEST_RECORD).map_err(|source| Unreadable::Io { path: path.into(), source })?;
        let record: Record =
            serde_json::from_slice(&bytes).map_err(|source| Unreadable::Format { path: path.into(), source })?;
        records.push(record);
    }
    Ok(Report::of(records))
}

impl Report {
    fn of(mut records: Vec<Record>) -> Self {
        records.sort_by_key(|record| record.rank);
        let world = records.iter().map(|record| record.world).max().unwrap_or(0);
        let recorded: BTreeSet<usize> = records.iter().map(|record| record.rank).collect();
        let mut report = Self {
            world,
            without_record: (0..world).filter(|rank| !recorded.contains(rank)).collect(),
            reasons: records.iter().map(|record| (record.rank, record.reason.clone())).collect(),
            ..Self::default()
        };
        let completed = |record: &Record, id: u64, label: &str| {
            record.completed.iter().find(|(name, of, _)| *of == id && name == label).map(|&(.., seq)| seq)
        };

        let mut called: BTreeMap<OpKey, BTreeMap<String, Vec<usize>>> = BTreeMap::new();
        let mut groups: BTreeSet<(u64, String)> = BTreeSet::new();
        // Ranks that have not arrived, by rank and operation: the description by the waiting ranks, and these ranks.
        let mut wanted: BTreeMap<(usize, OpKey), (String, Vec<usize>)> = BTreeMap::new();
        for record in &records {
            for operation in &record.operations {
                let Operation { group, group_id, seq, op, one_sided, .. } = operation;
                if !one_sided {
                    groups.insert((*group_id, group.clone()));
                    let place = (*group_id, group.clone(), *seq);
                    let ranks = called.entry(place).or_default().entry(op.clone()).or_default();
                    if ranks.last() != Some(&record.rank) {
                        ranks.push(record.rank);
                    }
                }
                let waits_for = operation.state.missing();
                if waits_for.is_empty() {
                    continue;
                }
                report.waits.push(Wait {
                    rank: record.rank,
                    group: group.clone(),
                    seq: *seq,
                    op: op.clone(),
                    for_ranks: waits_for.to_vec(),
                });
                for &peer in waits_for {
                    let place = (peer, (*group_id, group.clone(), *seq));
                    wanted.entry(place).or_insert_with(|| (op.clone(), Vec::new())).1.push(record.rank);
                }
            }
        }
        for ((_, group, seq), ops) in &called {
            if ops.len() > 1 {
                let called = ops.iter().map(|(op, ranks)| (op.clone(), ranks.clone())).collect();
                report.mismatches.push(Different { group: group.clone(), seq: *seq, called });
            }
        }
        for (id, label) in groups {
            let ranks = records.iter().map(|record| (record.rank, completed(record, id, &label))).collect();
            report.completed.push(Completed { group: label, ranks });
        }
        for ((rank, (id, group, seq)), (op, waited_for_by)) in wanted {
            let record = records.iter().find(|record| record.rank == rank);
            let has_come = record.is_some_and(|record| {
                let same = |o: &Operation| o.group_id == id && o.group == group && o.seq == seq && !o.one_sided;
                record.operations.iter().any(same)
            });
            if has_come {
                // It arrived after the waiting rank's record was written, or its bytes are in transit.
                continue;
            }
            let doing = record.and_then(|record| {
                let under_way =
                    record.operations.iter().rev().find(|operation| !operation.state.missing().is_empty())?;
                Some(format!("{} (operation {} of group '{}')", under_way.op, under_way.seq, under_way.group))
            });
            report.late.push(Late {
                rank,
                last_completed: record.and_then(|record| completed(record, id, &group)),
                recorded: record.is_some(),
                group,
                seq,
                op,
                waited_for_by,
                doing,
            });
        }
        // A rank that waits for nobody comes first, as a root cause; of several, the one that most ranks wait for.
        report.late.sort_by_key(|late| (late.recorded && late.doing.is_some(), usize::MAX - late.waited_for_by.len()));
        report
    }

    /// Returns the pairs of ranks that wait for each other although neither is behind, ascending.
    fn mutual(&self) -> BTreeSet<(usize, usize)> {
        let waits = |a: usize, b: usize| self.waits.iter().any(|wait| wait.rank == a && wait.for_ranks.contains(&b));
        let ranks: BTreeSet<usize> = self.waits.iter().map(|wait| wait.rank).collect();
        let pairs = ranks.iter().flat_map(|&a| ranks.range(a + 1..).map(move |&b| (a, b)));
        // Ranks that call different operations wait for each other too; they are reported as mismatches.
        pairs.filter(|&(a, b)| self.mismatches.is_empty() && waits(a, b) && waits(b, a)).collect()
    }
}

impl core::fmt::Display for Report {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for late in &self.late {
            let Late { rank, group, seq, op, waited_for_by, .. } = late;
            write!(
                f,
                "rank {rank} is late: rank(s) {waited_for_by:?} wait for it in {op} (operation {seq} of group '{group}')"
            )?;
            match (late.recorded, late.last_completed) {
                (false, _) => write!(f, "; it left no record: its process is dead, stopped or cut off")?,
                (true, Some(last)) => write!(f, "; the last operation that it completed in this group is {last}")?,
                (true, None) => write!(f, "; it has completed no operation in this group")?,
            }
            match &late.doing {
                Some(doing) => writeln!(f, ", and it is waiting in {doing}")?,
                None if late.recorded => writeln!(f, ", and it was in no operation")?,
                None => writeln!(f)?,
            }
        }
        for (first, second) in self.mutual() {
            writeln!(
                f,
                "ranks {first} and {second} wait for each other: data sent by one does not reach the other; check the \
                 network between their machines"
            )?;
        }
        for Different { group, seq, called } in &self.mismatches {
            write!(f, "operation {seq} of group '{group}' differs:")?;
            for (op, ranks) in called {
                write!(f, " rank(s) {ranks:?} called {op};")?;
            }
            writeln!(f)?;
        }
        if !self.without_record.is_empty() {
            writeln!(f, "no record of rank(s) {:?}", self.without_record)?;
        }
        for Completed { group, ranks } in &self.completed {
            let text = |last: Option<u64>| last.map_or("none".to_string(), |seq| seq.to_string());
            let all: Vec<String> = ranks.iter().map(|&(rank, last)| format!("rank {rank}: {}", text(last))).collect();
            let behind = ranks.iter().map(|&(_, last)| last).min().flatten();
            writeln!(f, "group '{group}', last completed: {} (lowest: {})", all.join(", "), text(behind))?;
        }
        for Wait { rank, group, seq, op, for_ranks } in &self.waits {
            writeln!(f, "rank {rank} waits for {for_ranks:?} in {op} (operation {seq} of group '{group}')")?;
        }
        if self.late.is_empty() && self.mismatches.is_empty() && self.waits.is_empty() {
            for (rank, reason) in &self.reasons {
                writeln!(f, "rank {rank} waited for no other rank; its record was written because: {reason}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Opening, Recorder};
    use super::*;

    fn opening(seq: u64, op: &str, waiting_for: Vec<usize>) -> Opening<'static> {
        Opening { group: "world", group_id: 1, seq, op: op.into(), bytes: 4, one_sided: false, waiting_for, last: true }
    }

    fn record(rank: usize, done: u64, waiting: Option<(&str, Vec<usize>)>) -> Record {
        let recorder = Recorder::new(rank, 3, None);
        for seq in 0..done {
            let entry = recorder.open(opening(seq, "barrier", vec![]));
            recorder.close(&entry, Ok(()));
        }
        if let Some((op, ranks)) = waiting {
            recorder.open(opening(done, op, ranks));
        }
        recorder.record("a test")
    }

    #[test]
    fn the_late_rank_is_named() {
        let all = vec![
            record(0, 5, Some(("all_reduce of 4 f32 (sum)", vec![2]))),
            record(1, 5, Some(("all_reduce of 4 f32 (sum)", vec![2]))),
            record(2, 5, None),
        ];
        let report = Report::of(all.clone());
        assert_eq!(report.late.len(), 1);
        let late = &report.late[0];
        assert_eq!((late.rank, late.seq, late.last_completed), (2, 5, Some(4)));
        assert_eq!(late.waited_for_by, [0, 1]);
        assert!(report.to_string().starts_with("rank 2 is late: rank(s) [0, 1] wait for it in all_reduce"), "{report}");

        let without = Report::of(all[..2].to_vec());
        assert_eq!(without.without_record, [2]);
        assert!(!without.late[0].recorded);
        assert!(without.to_string().contains("it left no record"), "{without}");
    }

    #[test]
    fn a_cut_link_is_told_from_a_late_rank() {
        let both = vec![
            record(0, 5, Some(("all_reduce of 4 f32 (sum)", vec![1]))),
            record(1, 5, Some(("all_reduce of 4 f32 (sum)", vec![0]))),
        ];
        let report = Report::of(both);
        assert!(report.late.is_empty());
        assert!(report.to_string().starts_with("ranks 0 and 1 wait for each other: "), "{report}");
    }

    #[test]
    fn different_operations_at_one_place_are_shown() {
        let report = Report::of(vec![
            record(0, 2, Some(("all_gather of 4 f32", vec![]))),
            record(1, 2, Some(("barrier", vec![]))),
        ]);
        assert_eq!(report.mismatches.len(), 1);
        assert_eq!(report.mismatches[0].seq, 2);
        assert!(report.to_string().contains("rank(s) [0] called all_gather of 4 f32"), "{report}");
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flight-rank-0.json");
        std::fs::write(&path, "{\"rank\": 1").unwrap();
        assert!(matches!(merge(&[&path]), Err(Unreadable::Format { .. })));
        assert!(matches!(merge(&[folder.path().join("none")]), Err(Unreadable::Io { .. })));
    }
}
