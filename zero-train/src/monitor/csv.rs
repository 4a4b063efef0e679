//! A CSV file that grows by one row a step.
//!
//! In: the names of the columns, then rows of values. Out: `DIR/NAME.csv`, comma-separated with RFC 4180 quoting
//! (<https://www.rfc-editor.org/rfc/rfc4180>) and `\n` line ends, its first column `step`. Each row is one write, so a
//! reader sees whole rows, and a run that was stopped can be taken up in the same file.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::iter::once;
use std::path::{Path, PathBuf};

use super::{MonitorError, Result, append, io_error};

/// Appends rows to one CSV file.
#[derive(Debug)]
pub struct CsvMonitor {
    file: File,
    path: PathBuf,
    columns: Vec<String>,
}

impl CsvMonitor {
    /// Opens `DIR/NAME.csv` for appending, with the columns `step` and `columns`, and writes the header if the file is
    /// new. Creates `dir` if need be.
    ///
    /// An existing file keeps its rows; a last row without a line end, left by a run that was cut off while it wrote,
    /// is removed.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Name`] if `name` is no plain file name; [`MonitorError::Header`] if the file's first line names
    /// other columns (the file is left as it was); [`MonitorError::Io`].
    pub fn open(dir: &Path, name: &str, columns: &[&str]) -> Result<Self> {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
        if !name.chars().all(plain) || name.trim_matches('.').is_empty() {
            return Err(MonitorError::Name { got: name.to_string() });
        }
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let path = dir.join(format!("{name}.csv"));
        let names = once("step".to_string()).chain(columns.iter().map(|column| quoted(column)));
        let mut header = names.collect::<Vec<_>>().join(",");
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(io_error("open", &path))?;
        let rows_end = rows_end(&mut file, &path, &header)?;
        let length = file.metadata().map_err(io_error("read", &path))?.len();
        if rows_end < length {
            file.set_len(rows_end).map_err(io_error("cut the unfinished last line of", &path))?;
        }
        if rows_end == 0 {
            header.push('\n');
            file.write_all(header.as_bytes()).map_err(io_error("write", &path))?;
        }
        Ok(Self { file, path, columns: columns.iter().map(ToString::to_string).collect() })
    }

    /// Removes the rows after the last of a step up to `step`, for a run that goes on after that step: they are of steps that
    /// come again.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`].
    pub fn cut_after(&mut self, step: usize) -> Result<()> {
        self.file.seek(SeekFrom::Start(0)).map_err(io_error("read", &self.path))?;
        let (mut lines, mut line) = (BufReader::new(&self.file), Vec::new());
        let (mut at, mut keep) = (0, 0);
        while lines.read_until(b'\n', &mut line).map_err(io_error("read", &self.path))? > 0 {
            let number =
                line.split(|&byte| byte == b',').next().and_then(|cell| std::str::from_utf8(cell).ok()?.parse().ok());
            at += line.len() as u64;
            // The header, which has no number, and steps that stay.
            if number.is_none_or(|number: usize| number <= step) {
                keep = at;
            }
            line.clear();
        }
        if keep < at {
            self.file.set_len(keep).map_err(io_error("cut the rows of steps that come again off", &self.path))?;
        }
        Ok(())
    }

    /// Appends one row and hands it to the operating system. A column without a value stays empty; of two values for a
    /// column the last counts. Numbers are written so that they read back exactly; `NaN`, `inf` and `-inf` as such.
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
        let row = once(step.to_string()).chain(cells).collect::<Vec<_>>().join(",") + "\n";
        append(&mut self.file, row.as_bytes(), &self.path)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The position after the last whole line of a file that begins with `header`; 0 for a file to be begun.
fn rows_end(file: &mut File, path: &Path, header: &str) -> Result<u64> {
    // Two bytes more than the header show whether a line end follows it, "\n" or "\r\n".
    let mut start = Vec::new();
    file.take(header.len() as u64 + 2).read_to_end(&mut start).map_err(io_error("read", path))?;
    let complete = start.strip_prefix(header.as_bytes());
    if !complete.is_some_and(|rest| rest.starts_with(b"\n") || rest.starts_with(b"\r\n")) {
        if header.as_bytes().starts_with(&start) || complete == Some(b"\r") {
            return Ok(0); // empty, or cut off within the header
        }
        let line = start.split(|&byte| byte == b'\n').next().unwrap_or_default();
        let got = String::from_utf8_lossy(line).trim_end().to_string();
        return Err(MonitorError::Header { path: path.to_path_buf(), expected: header.to_string(), got });
    }
    // Rows are numbers, so every '\n' after the header ends one. The last is near the end.
    let mut end = file.seek(SeekFrom::End(0)).map_err(io_error("read", path))?;
    while end > 0 {
        let begin = end.saturating_sub(4096);
        let mut block = Vec::new();
        file.seek(SeekFrom::Start(begin)).map_err(io_error("read", path))?;
        file.take(end - begin).read_to_end(&mut block).map_err(io_error("read", path))?;
        if let Some(at) = block.iter().rposition(|&byte| byte == b'\n') {
            return Ok(begin + at as u64 + 1);
        }
        end = begin;
    }
    Ok(0)
}

/// A field with RFC 4180 quoting where it needs it.
fn quoted(field: &str) -> String {
    if field.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_string()
    }
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
        csv.cut_after(40).unwrap();
        assert_eq!(text(&csv).lines().count(), 46);
        csv.cut_after(3).unwrap();
        // An earlier run's rows stay, as they do without a resume.
        assert_eq!(text(&csv).lines().count(), 9);
        csv.write(4, &[("loss", 0.5)]).unwrap();
        assert!(text(&csv).ends_with("3,3.0\n4,0.5\n"));
        csv.cut_after(0).unwrap();
        assert_eq!(text(&csv), "step,loss\n");
    }
}
