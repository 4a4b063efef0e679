//! A CSV file that grows by one row per step.
//!
//! Input: the names of the columns, then rows of values. Output: `DIR/NAME.csv`, comma-separated with RFC 4180 quoting
//! (<https://www.rfc-editor.org/rfc/rfc4180>) and `\n` line ends, its first column `step`. Each row is one write, so a
//! reader sees complete rows, and a resumed run can continue the file.

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::iter::once;
use std::path::{Path, PathBuf};

use super::{MonitorError, Result, append, io_error};

/// A monitor that appends rows to one CSV file.
#[derive(Debug)]
pub struct CsvMonitor {
    file: File,
    path: PathBuf,
    columns: Vec<String>,
}

impl CsvMonitor {
    /// Opens `DIR/NAME.csv` for appending, with the columns `step` and `columns`, and writes the header if the file is new.
    /// Creates `dir` if necessary.
    ///
    /// An existing file keeps its rows. A last row without a line end, left by a run that was interrupted while it wrote, is removed.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Name`] if `name` is not a plain file name; [`MonitorError::Header`] if the file's first line names
    /// other columns (the file is left unchanged); [`MonitorError::Io`].
    pub fn open(dir: &Path, name: &str, columns: &[&str]) -> Result<Self> {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !name.chars().all(plain) || name.trim_matches('.').is_empty() {
            return Err(MonitorError::Name { got: name.to_string() });
        }
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let path = dir.join(format!("{name}.csv"));
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(io_error("open", &path))?;
        let mut there = Vec::new();
        file.read_to_end(&mut there).map_err(io_error("read", &path))?;
        let header = row(once("step").chain(columns.iter().copied()));
        let mut whole = there.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let found = csv::Reader::from_reader(&there[..]).byte_headers().map(row).unwrap_or_default();
        if found != header || whole == 0 {
            // Only a header that was cut off within is begun anew.
            if !header.starts_with(there.strip_suffix(b"\r").unwrap_or(&there)) {
                let text = |row: &[u8]| String::from_utf8_lossy(row).trim_end().to_string();
                let got = there.split(|&byte| byte == b'\n').next().unwrap_or_default();
                return Err(MonitorError::Header { path, expected: text(&header), got: text(got) });
            }
            whole = 0;
        }
        if whole < there.len() {
            file.set_len(whole as u64).map_err(io_error("remove the incomplete last line of", &path))?;
        }
        if whole == 0 {
            append(&mut file, &header, &path)?;
        }
        Ok(Self { file, path, columns: columns.iter().map(ToString::to_string).collect() })
    }

    /// Removes the rows after the last row whose step is at most `step`, for a run that resumes after `step` and repeats later steps.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn truncate_after(&mut self, step: usize) -> Result<()> {
        let there = fs::read(&self.path).map_err(io_error("read", &self.path))?;
        let mut header = csv::Reader::from_reader(&there[..]);
        header.byte_headers().map_err(|error| io_error("read", &self.path)(error.into()))?;
        let mut at = header.position().byte() as usize;
        let mut keep = at;
        for line in there[at..].split_inclusive(|&byte| byte == b'\n') {
            at += line.len();
            let cell = line.split(|&byte| byte == b',').next().unwrap_or_default();
            let number = std::str::from_utf8(cell).ok().and_then(|cell| cell.parse().ok());
            if number.is_none_or(|number: usize| number <= step) {
                keep = at;
            }
        }
        if keep < there.len() {
            let cut = self.file.set_len(keep as u64);
            cut.map_err(io_error("remove the rows of steps that run again from", &self.path))?;
        }
        Ok(())
    }

    /// Appends one row and passes it to the operating system. A column without a value stays empty; if a column has two
    /// values, the last one counts. Numbers are written so that they read back exactly; `NaN`, `inf` and `-inf` as such.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Column`] for a value without a column (nothing is written); [`MonitorError::Io`].
    pub fn write(&mut self, step: usize, values: &[(&str, f64)]) -> Result<()> {
        let mut cells = vec![String::new(); self.columns.len()];
        for &(name, value) in values {
            let Some(at) = self.columns.iter().position(|column| column == name) else {
                let (path, columns) = (self.path.clone(), self.columns.clone());
                return Err(MonitorError::Column { path, got: name.to_string(), columns });
            };
            cells[at] = format!("{value:?}");
        }
        append(&mut self.file, &row(once(step.to_string()).chain(cells)), &self.path)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Formats one line of the file.
fn row<C: AsRef<[u8]>>(cells: impl IntoIterator<Item = C>) -> Vec<u8> {
    let mut line = csv::Writer::from_writer(Vec::new());
    line.write_record(cells).expect("memory takes what is written");
    line.into_inner().expect("memory takes what is written")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(monitor: &CsvMonitor) -> String {
        fs::read_to_string(monitor.path()).unwrap()
    }

    #[test]
    fn rows_are_appended_under_one_header() {
        let dir = tempfile::tempdir().unwrap();
        let nested = dir.path().join("a/b");
        let mut csv = CsvMonitor::open(&nested, "run-1", &["loss", "lr"]).unwrap();
        csv.write(1, &[("loss", 2.5), ("lr", 1e-7)]).unwrap();
        csv.write(2, &[("lr", f64::NAN)]).unwrap();
        drop(csv);
        let mut csv = CsvMonitor::open(&nested, "run-1", &["loss", "lr"]).unwrap();
        csv.write(3, &[("lr", f64::INFINITY), ("loss", 0.1 + 0.2)]).unwrap();
        assert_eq!(text(&csv), "step,loss,lr\n1,2.5,1e-7\n2,,NaN\n3,0.30000000000000004,inf\n");
    }

    #[test]
    fn names_are_quoted() {
        let dir = tempfile::tempdir().unwrap();
        let columns = ["a,b", "say \"hi\"", "two\nlines"];
        for _ in 0..2 {
            CsvMonitor::open(dir.path(), "q", &columns).unwrap().write(1, &[("two\nlines", 4.0)]).unwrap();
        }
        let csv = CsvMonitor::open(dir.path(), "q", &columns).unwrap();
        assert_eq!(text(&csv), "step,\"a,b\",\"say \"\"hi\"\"\",\"two\nlines\"\n1,,,4.0\n1,,,4.0\n");
    }

    #[test]
    fn another_header_is_refused_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        CsvMonitor::open(dir.path(), "x", &["loss"]).unwrap();
        for columns in [&["lr"][..], &["loss", "lr"], &[]] {
            let error = CsvMonitor::open(dir.path(), "x", columns).unwrap_err();
            assert!(matches!(&error, MonitorError::Header { got, .. } if got.starts_with("step,")), "{error}");
            assert!(error.to_string().contains("other columns"), "{error}");
        }
        assert_eq!(fs::read_to_string(dir.path().join("x.csv")).unwrap(), "step,loss\n");
    }

    #[test]
    fn an_unfinished_last_row_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.csv");
        let long = format!("step,loss\r\n1,2.0\r\n2,{}", "3".repeat(10_000));
        for (before, after) in [
            ("step,loss\n1,2.0\n2,3.", "step,loss\n1,2.0\n3,4.0\n"),
            ("step,lo", "step,loss\n3,4.0\n"),
            ("step,loss", "step,loss\n3,4.0\n"),
            ("step,loss\r", "step,loss\n3,4.0\n"),
            ("", "step,loss\n3,4.0\n"),
            (&long, "step,loss\r\n1,2.0\r\n3,4.0\n"),
        ] {
            fs::write(&path, before).unwrap();
            CsvMonitor::open(dir.path(), "x", &["loss"]).unwrap().write(3, &[("loss", 4.0)]).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), after, "{before:?}");
        }
    }

    #[test]
    fn bad_names_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["", ".", "..", "a/b", "../x", "a\0"] {
            let error = CsvMonitor::open(dir.path(), name, &["loss"]).unwrap_err();
            assert!(matches!(error, MonitorError::Name { .. }), "{error}");
        }
        let mut csv = CsvMonitor::open(dir.path(), "x", &["loss", "lr"]).unwrap();
        let error = csv.write(1, &[("los", 1.0)]).unwrap_err();
        assert!(error.to_string().ends_with("has no column \"los\"; its columns are loss, lr"), "{error}");
        assert_eq!(text(&csv), "step,loss,lr\n");
    }

    #[test]
    fn rows_of_steps_that_come_again_are_cut() {
        let dir = tempfile::tempdir().unwrap();
        let mut csv = CsvMonitor::open(dir.path(), "x", &["loss"]).unwrap();
        (1..=5).chain(1..=40).for_each(|step| csv.write(step, &[("loss", step as f64)]).unwrap());
        csv.truncate_after(40).unwrap();
        assert_eq!(text(&csv).lines().count(), 46);
        csv.truncate_after(3).unwrap();
        // An earlier run's rows stay, as they do without a resume.
        assert_eq!(text(&csv).lines().count(), 9);
        csv.write(4, &[("loss", 0.5)]).unwrap();
        assert!(text(&csv).ends_with("3,3.0\n4,0.5\n"));
        csv.truncate_after(0).unwrap();
        assert_eq!(text(&csv), "step,loss\n");
        for (after, expected) in [(1, "step,loss\r\n1,2.0\r\n"), (9, "step,loss\r\n1,2.0\r\n2,3.0\r\n")] {
            fs::write(csv.path(), "step,loss\r\n1,2.0\r\n2,3.0\r\n").unwrap();
            csv.truncate_after(after).unwrap();
            assert_eq!(text(&csv), expected);
        }
    }
}
