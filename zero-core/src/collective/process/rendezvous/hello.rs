//! The handshake of a connection: identification and authentication of the rank that connects.
//!
//! 1. A rank sends a hello: magic, protocol, number of ranks, its rank, whether it has a secret, its job, and a random number.
//! 2. The listener answers with its own random number.
//! 3. The rank proves that it knows the job's key, by a code (HMAC-SHA-256) over the messages so far. The listener proves the
//!    same in turn, and admits the rank.
//! 4. The rank acknowledges this. Only then does it count as connected: one that gave up meanwhile will connect again.
//!
//! The key is the job's secret; the listeners of ranks other than rank 0 add a token, which rank 0 sends to the ranks that it
//! has admitted. Without a secret, the code proves only that a rank knows this job's id. This module has the side of the rank
//! that connects; the other is in [`door`](super::door).

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use rustix::net::sockopt;
use sha2::{Digest, Sha256};

use super::super::super::launcher::{Rendezvous, random};

/// The first bytes that a rank sends.
pub(super) const MAGIC: [u8; 8] = *b"zerorank";
/// Version of the protocol; raised when the messages change.
pub(super) const PROTOCOL: u32 = 5;
/// Size in bytes of the magic and the protocol version.
pub(super) const HEAD: usize = 12;
/// Size in bytes of a job's id.
pub(super) const JOB: usize = 64;
/// Size in bytes of a random number, and of a code.
pub(super) const CODE: usize = 32;
/// Size in bytes of a hello.
pub(super) const HELLO: usize = HEAD + 9 + JOB + CODE;
/// Maximum length of a refusal's reason, in bytes.
pub(super) const REASON: usize = 4096;

/// The token that the ranks admitted by rank 0 share.
pub(super) type Token = [u8; CODE];

/// Time limit for the complete handshake of a connection.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(3);
/// Time limit for sending a message before the run begins: these messages are small.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// Time limit for sent data to be acknowledged by the other machine: longer than the pause of a machine that is migrated, or of
/// a process that is stopped briefly with full buffers.
const CUT_OFF_MS: u32 = 60_000;

/// The key by which ranks authenticate to each other.
pub(super) struct JobKey {
    pub(super) job: [u8; JOB],
    pub(super) has_secret: bool,
    bytes: Vec<u8>,
}

impl JobKey {
    pub(super) fn of(job: &Rendezvous) -> Self {
        let mut id = [0; JOB];
        match job.id.len() {
            0..=JOB => id[..job.id.len()].copy_from_slice(job.id.as_bytes()),
            _ => {
                let hex = Sha256::digest(&job.id).iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
                id.copy_from_slice(hex.as_bytes());
            }
        }
        let bytes = job.secret.as_ref().map_or_else(Vec::new, |secret| secret.reveal().as_bytes().to_vec());
        Self { job: id, has_secret: job.secret.is_some(), bytes }
    }

    /// Returns the key for the listeners of ranks other than rank 0.
    pub(super) fn with(&self, token: &Token) -> Self {
        Self { bytes: [&self.bytes[..], token].concat(), ..*self }
    }

    /// Returns the code by which a rank (`role` "rank") and the listener of rank `at` ("door") prove that they know the key.
    pub(super) fn code(&self, role: &str, at: usize, hello: &[u8], number: &[u8]) -> Hmac<Sha256> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.bytes).expect("a key may have any length");
        for part in [role.as_bytes(), &(at as u64).to_le_bytes(), hello, number] {
            code.update(part);
        }
        code
    }
}

/// The reason why a rank was not admitted.
#[derive(Debug)]
pub(super) enum Turned {
    /// The listener refused this rank.
    Away(String),
    /// No listener admitted it in time; the error of the last attempt.
    Late(String),
}

/// Connects to the listener of rank `at`, with retries until `until`: its name may not resolve yet, or it may not listen yet.
/// Returns the connection, and the time that rank `at` still waits for others.
pub(super) fn knock(
    (host, port): (&str, u16),
    at: usize,
    (rank, world): (usize, usize),
    key: &JobKey,
    until: Instant,
) -> Result<(TcpStream, Duration), Turned> {
    let mut pause = Duration::from_millis(20);
    loop {
        let last = match attempt(host, port).and_then(|stream| introduce(stream, at, (rank, world), key)) {
            Ok(Ok(welcomed)) => return Ok(welcomed),
            Ok(Err(reason)) => return Err(Turned::Away(reason)),
            Err(error) => error.to_string(),
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Turned::Late(last));
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

fn attempt(host: &str, port: u16) -> std::io::Result<TcpStream> {
    let mut last = Error::new(ErrorKind::NotFound, format!("{host} has no address"));
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            // Without a listener on a port of its ephemeral range, a machine can connect to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Runs the handshake on `stream`; the inner error is the refusal.
fn introduce(
    mut stream: TcpStream,
    at: usize,
    (rank, world): (usize, usize),
    key: &JobKey,
) -> std::io::Result<Result<(TcpStream, Duration), String>> {
    // A little longer than the listener's limit: its refusal says more than the end of a connection.
    let end = Instant::now() + HELLO_LIMIT + ATTEMPT;
    let mut hello = MAGIC.to_vec();
    for number in [PROTOCOL, world as u32, rank as u32] {
        hello.extend_from_slice(&number.to_le_bytes());
    }
    hello.push(key.has_secret.into());
    hello.extend_from_slice(&key.job);
    hello.extend_from_slice(&random()?);
    settle(&stream)?;
    send(&stream, &hello)?;
    if let Err(refusal) = answer(&mut stream, end)? {
        return Ok(Err(refusal));
    }
    let mut number = [0; CODE];
    read_all(&mut stream, &mut number, end)?;
    send(&stream, &key.code("rank", at, &hello, &number).finalize().into_bytes())?;
    if let Err(refusal) = answer(&mut stream, end)? {
        return Ok(Err(refusal));
    }
    let mut welcome = [0; 4 + CODE];
    read_all(&mut stream, &mut welcome, end)?;
    if key.code("door", at, &hello, &number).verify_slice(&welcome[4..]).is_err() {
        return Ok(Err("the program that listens there does not know this job's secret".into()));
    }
    send(&stream, &[1])?;
    stream.set_read_timeout(None)?;
    Ok(Ok((stream, Duration::from_millis(u32::from_le_bytes([welcome[0], welcome[1], welcome[2], welcome[3]]).into()))))
}

#[cfg(test)]
thread_local! {
    /// Messages and bytes that this thread has sent.
    pub(super) static SENT: std::cell::Cell<[usize; 2]> = const { std::cell::Cell::new([0; 2]) };
}

/// Counts a message, for the tests that check their number.
pub(super) fn count(bytes: usize) {
    let _ = bytes;
    #[cfg(test)]
    SENT.set([SENT.get()[0] + 1, SENT.get()[1] + bytes]);
}

pub(super) fn send(mut stream: &TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    count(bytes.len());
    stream.write_all(bytes)
}

/// Reads whether the listener continues; the inner error is its reason not to.
fn answer(stream: &mut TcpStream, end: Instant) -> std::io::Result<Result<(), String>> {
    let mut length = [0; 4];
    read_all(stream, &mut length, end)?;
    match u32::from_le_bytes(length) as usize {
        0 => Ok(Ok(())),
        length @ 1..=REASON => {
            let mut reason = vec![0; length];
            read_all(stream, &mut reason, end)?;
            Ok(Err(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Ok(Err("the program that listens there is not a rank; set MASTER_PORT to a free port".into())),
    }
}

/// Fills `bytes` with data received before `until`.
pub(super) fn read_all(stream: &mut TcpStream, bytes: &mut [u8], until: Instant) -> std::io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        // A timeout of zero is invalid.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "its connection ended")),
            // A slow trickle of bytes must not extend the wait.
            Ok(_) if left.is_zero() => return Err(Error::new(ErrorKind::TimedOut, "it sent too little in time")),
            Ok(more) => have += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(Error::new(ErrorKind::TimedOut, "it sent nothing in time"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Configures a connection: small messages are sent at once, no send blocks forever, and a machine that is cut off is noticed.
pub(super) fn settle(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    // If the system refuses, its own timeouts remain.
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
    let _ = sockopt::set_tcp_user_timeout(stream, CUT_OFF_MS);
    Ok(())
}
