//! The first words on a connection: who connects, and whether it is wanted.
//!
//! 1. A rank says hello: magic, protocol, number of ranks, its rank, whether it has a secret, its job, and a random number.
//! 2. The door answers with a random number of its own.
//! 3. The rank proves that it knows the job's key, by a code (HMAC with SHA-256) over all that was said; the door proves it in
//!    turn, and lets the rank in.
//! 4. The rank says that it has heard so. Only then it counts: one that gave up meanwhile will come again.
//!
//! The key is the job's secret, and at the doors of ranks that are not rank 0 a token besides, which rank 0 tells those who have
//! come so far. Without a secret the code proves only that a rank speaks for this job's id. This is the side of the rank that
//! connects; the other is in [`door`](super::door).

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use rustix::net::sockopt;
use sha2::{Digest, Sha256};

use super::super::super::launcher::{Rendezvous, random};

/// What a rank's first bytes are.
pub(super) const MAGIC: [u8; 8] = *b"zerorank";
/// Raised when the messages change.
pub(super) const PROTOCOL: u32 = 5;
/// Bytes until the protocol is known.
pub(super) const HEAD: usize = 12;
/// Bytes of a job's id.
pub(super) const JOB: usize = 64;
/// Bytes of a random number, and of a code.
pub(super) const CODE: usize = 32;
/// Bytes of a hello.
pub(super) const HELLO: usize = HEAD + 9 + JOB + CODE;
/// Longest reason of a refusal.
pub(super) const REASON: usize = 4096;

/// What the ranks of a job know that rank 0 has let in.
pub(super) type Token = [u8; CODE];

/// How long a connection may take to say, in all, who it is.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long a connection may take to take a message before the run begins: what is sent then is small.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// How long what was sent may go without an answer of the other machine: longer than a machine that is moved, or a process that
/// is stopped for a moment with its buffers full, stays away.
const CUT_OFF_MS: u32 = 60_000;

/// What a rank knows of its job, and a stranger does not.
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

    /// The key of the doors of ranks that are not rank 0.
    pub(super) fn with(&self, token: &Token) -> Self {
        Self { bytes: [&self.bytes[..], token].concat(), ..*self }
    }

    /// The code by which a rank (`role` "rank") and the door of rank `at` prove that they know the key.
    pub(super) fn code(&self, role: &str, at: usize, hello: &[u8], number: &[u8]) -> Hmac<Sha256> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.bytes).expect("a key may have any length");
        for part in [role.as_bytes(), &(at as u64).to_le_bytes(), hello, number] {
            code.update(part);
        }
        code
    }
}

/// Why a door stayed closed.
#[derive(Debug)]
pub(super) enum Turned {
    /// Whoever is there does not want this rank.
    Away(String),
    /// Nobody opened in time; what the last attempt ran into.
    Late(String),
}

/// Connects to the door of rank `at`, and says hello, until it is late; gives the connection, and how long the rank there waits
/// for others. The name may not be known yet, and nobody may listen yet: both are tried again.
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
            // A machine without a listener on a port of its own range can connect to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Says hello, and proves it; the inner error is the refusal.
fn introduce(
    mut stream: TcpStream,
    at: usize,
    (rank, world): (usize, usize),
    key: &JobKey,
) -> std::io::Result<Result<(TcpStream, Duration), String>> {
    // A little longer than the door, whose words say more than a connection that ends.
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
        return Ok(Err("what listens there does not know this job's secret".into()));
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

/// Counts a message, for the test of how many there are.
pub(super) fn count(bytes: usize) {
    let _ = bytes;
    #[cfg(test)]
    SENT.set([SENT.get()[0] + 1, SENT.get()[1] + bytes]);
}

pub(super) fn send(mut stream: &TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    count(bytes.len());
    stream.write_all(bytes)
}

/// Whether the door goes on; the inner error is why not.
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
        _ => Ok(Err("what listens there is no rank of this program; MASTER_PORT must be free for it".into())),
    }
}

/// Fills `bytes` with what comes until then.
pub(super) fn read_all(stream: &mut TcpStream, bytes: &mut [u8], until: Instant) -> std::io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        let left = until.saturating_duration_since(Instant::now());
        // A timeout of nothing would be none.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(Error::new(ErrorKind::UnexpectedEof, "its connection ended")),
            // One byte now and then must not keep this going.
            Ok(_) if left.is_zero() => return Err(Error::new(ErrorKind::TimedOut, "it said too little in time")),
            Ok(more) => have += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(Error::new(ErrorKind::TimedOut, "it said nothing in time"));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Small messages go out at once, none is waited for without end, and a machine that is cut off is noticed.
pub(super) fn settle(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    // A refusal leaves the system's own times.
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
    let _ = sockopt::set_tcp_user_timeout(stream, CUT_OFF_MS);
    Ok(())
}
