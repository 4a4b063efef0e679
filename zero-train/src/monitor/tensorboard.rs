//! TensorBoard event files with scalars, read by `tensorboard --logdir DIR`.
//!
//! Input: a step number and named values. Output: `DIR/events.out.tfevents.SECONDS.HOST.PID.N`, which begins with the file
//! version and then holds one event per step. Values are stored as 32-bit floats, as TensorBoard's `simple_value` is.
//!
//! The file is a sequence of records, each the payload's length (8 bytes, little endian), a masked CRC-32C of the length (4
//! bytes), the payload, and a masked CRC-32C of the payload (4 bytes):
//! <https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details>. The payload is an `Event`
//! message of <https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto> with a
//! `Summary` of <https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/summary.proto>, encoded
//! by hand:
//!
//! | message | field | number | wire type |
//! |---|---|---|---|
//! | `Event` | `wall_time` | 1 | 64 bits |
//! | | `step` | 2 | varint |
//! | | `file_version` | 3 | bytes |
//! | | `summary` | 5 | bytes |
//! | `Summary` | `value` (repeated) | 1 | bytes |
//! | `Value` | `tag` | 1 | bytes |
//! | | `simple_value` | 2 | 32 bits |

use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Result, append, io_error};

/// The protobuf wire types used here.
#[derive(Clone, Copy)]
enum Wire {
    Varint = 0,
    Bits64 = 1,
    Bytes = 2,
    Bits32 = 5,
}

/// A writer of one event file.
#[derive(Debug)]
pub struct TensorBoardMonitor {
    file: File,
    path: PathBuf,
}

impl TensorBoardMonitor {
    /// Creates `dir` if necessary, and a new event file in it. TensorBoard joins the files of a folder, so a resumed run
    /// may use the folder of the run it continues.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`](crate::monitor::MonitorError::Io).
    pub fn create(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).map_err(io_error("create", dir))?;
        let now = since_epoch();
        let base = format!("events.out.tfevents.{:010}.{}.{}", now.as_secs(), host_name(), process::id());
        let (file, path) = create_new(dir, &base)?;
        let mut monitor = Self { file, path };
        monitor.append(&[time_field(now.as_secs_f64()), bytes_field(3, b"brain.Event:2")].concat())?;
        Ok(monitor)
    }

    /// Appends one event with all `values` of a step and passes it to the operating system. TensorBoard groups tags by the
    /// part before the first `/`, as in `train/loss`. NaN and infinities are stored as such.
    ///
    /// # Errors
    ///
    /// [`MonitorError::Io`](crate::monitor::MonitorError::Io).
    pub fn write(&mut self, step: usize, values: &[(&str, f64)]) -> Result<()> {
        self.append(&scalars_event(since_epoch().as_secs_f64(), step, values))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn append(&mut self, payload: &[u8]) -> Result<()> {
        append(&mut self.file, &framed(payload), &self.path)
    }
}

/// Creates a new file, even for two monitors of one process in the same second.
fn create_new(dir: &Path, base: &str) -> Result<(File, PathBuf)> {
    for number in 0_u32.. {
        let path = dir.join(format!("{base}.{number}"));
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io_error("create", &path)(error)),
        }
    }
    Err(io_error("create", dir)(ErrorKind::AlreadyExists.into()))
}

fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the machine's name, without characters that a file name cannot hold.
fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok()).or_else(|| std::env::var("COMPUTERNAME").ok());
    let keep = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let name: String = name.unwrap_or_default().chars().filter(keep).take(64).collect();
    if name.is_empty() { "localhost".to_string() } else { name }
}

fn scalars_event(wall_time: f64, step: usize, values: &[(&str, f64)]) -> Vec<u8> {
    let value = |&(tag, number): &(&str, f64)| {
        let number = field(2, Wire::Bits32, &(number as f32).to_le_bytes());
        bytes_field(1, &[bytes_field(1, tag.as_bytes()), number].concat())
    };
    let summary: Vec<u8> = values.iter().flat_map(value).collect();
    let step = varint(i64::try_from(step).unwrap_or(i64::MAX) as u64);
    [time_field(wall_time), field(2, Wire::Varint, &step), bytes_field(5, &summary)].concat()
}

/// Returns a record: the payload with its length and both checksums.
fn framed(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let [of_length, of_payload] = [&length[..], payload].map(|bytes| masked_crc(bytes).to_le_bytes());
    [&length[..], &of_length, payload, &of_payload].concat()
}

/// Returns a masked CRC-32C: rotated and shifted so that a checksum of data that contains checksums is still a good one.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Encodes a field of a message. All numbers are below 16, so that number and wire type are one byte.
fn field(number: u8, wire: Wire, value: &[u8]) -> Vec<u8> {
    [&[number << 3 | wire as u8][..], value].concat()
}

fn bytes_field(number: u8, bytes: &[u8]) -> Vec<u8> {
    field(number, Wire::Bytes, &[&varint(bytes.len() as u64)[..], bytes].concat())
}

fn time_field(wall_time: f64) -> Vec<u8> {
    field(1, Wire::Bits64, &wall_time.to_le_bytes())
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes CRC-32C bit by bit, to check the framing without the library that made it.
    fn crc_by_bits(bytes: &[u8]) -> u32 {
        let mut crc = !0_u32;
        for &byte in bytes {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
            }
        }
        !crc
    }

    fn unmasked(masked: u32) -> u32 {
        masked.wrapping_sub(0xa282_ead8).rotate_left(15)
    }

    fn u32_at(bytes: &[u8]) -> u32 {
        u32::from_le_bytes(bytes[..4].try_into().unwrap())
    }

    fn u64_at(bytes: &[u8]) -> u64 {
        u64::from_le_bytes(bytes[..8].try_into().unwrap())
    }

    fn payloads(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Vec::new();
        while !file.is_empty() {
            let length = u64_at(file) as usize;
            assert_eq!(unmasked(u32_at(&file[8..])), crc_by_bits(&file[..8]));
            let payload = &file[12..12 + length];
            assert_eq!(unmasked(u32_at(&file[12 + length..])), crc_by_bits(payload));
            out.push(payload.to_vec());
            file = &file[16 + length..];
        }
        out
    }

    /// A message as (field, raw value): varints and fixed numbers as bits, bytes as they are.
    #[derive(Debug, PartialEq)]
    enum Raw {
        Number(u64),
        Bytes(Vec<u8>),
    }

    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }

    fn fields(mut bytes: &[u8]) -> Vec<(u64, Raw)> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let (raw, used) = match key & 7 {
                0 => (Raw::Number(varint(&mut bytes)), 0),
                1 => (Raw::Number(u64_at(bytes)), 8),
                2 => {
                    let length = varint(&mut bytes) as usize;
                    (Raw::Bytes(bytes[..length].to_vec()), length)
                }
                5 => (Raw::Number(u64::from(u32_at(bytes))), 4),
                other => panic!("wire type {other}"),
            };
            bytes = &bytes[used..];
            out.push((key >> 3, raw));
        }
        out
    }

    fn bytes_of(raw: &Raw) -> &[u8] {
        match raw {
            Raw::Bytes(bytes) => bytes,
            Raw::Number(number) => panic!("a number, {number}"),
        }
    }

    fn scalar(tag: &str, value: f32) -> Vec<(u64, Raw)> {
        vec![(1, Raw::Bytes(tag.into())), (2, Raw::Number(u64::from(value.to_bits())))]
    }

    #[test]
    fn a_file_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let mut monitor = TensorBoardMonitor::create(&dir.path().join("logs")).unwrap();
        monitor.write(1, &[("train/loss", 2.5), ("train/lr", 1e-4)]).unwrap();
        monitor.write(70_000, &[("train/loss", f64::INFINITY)]).unwrap();
        // Read without closing: every step is handed over at once.
        let events: Vec<_> = payloads(&fs::read(monitor.path()).unwrap()).iter().map(|event| fields(event)).collect();
        assert_eq!(events.len(), 3);
        assert_eq!(events[0][1], (3, Raw::Bytes(b"brain.Event:2".to_vec())));
        for event in &events {
            let Raw::Number(bits) = event[0].1 else { panic!("no time") };
            let age = since_epoch().as_secs_f64() - f64::from_bits(bits);
            assert!(event[0].0 == 1 && (0.0..60.0).contains(&age), "{age}");
        }
        assert_eq!(events[1][1], (2, Raw::Number(1)));
        assert_eq!(events[2][1], (2, Raw::Number(70_000)));
        let summary = |event: &[(u64, Raw)]| -> Vec<_> {
            assert_eq!(event[2].0, 5);
            fields(bytes_of(&event[2].1)).iter().map(|(_, value)| fields(bytes_of(value))).collect()
        };
        assert_eq!(summary(&events[1]), [scalar("train/loss", 2.5), scalar("train/lr", 1e-4)]);
        assert_eq!(summary(&events[2]), [scalar("train/loss", f32::INFINITY)]);
    }

    #[test]
    fn two_files_do_not_collide() {
        let dir = tempfile::tempdir().unwrap();
        let made: Vec<_> =
            (0..3).map(|_| TensorBoardMonitor::create(dir.path()).unwrap().path().to_path_buf()).collect();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
        let name = made[0].file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("events.out.tfevents.") && name.contains(&format!(".{}.", process::id())), "{name}");
    }

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc_by_bits(b"123456789"), 0xe306_9283); // the published check value
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }
}
