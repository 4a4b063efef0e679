//! The first words on a connection: who connects, and whether it is wanted.
//!
//! A rank says hello (magic, protocol, number of ranks, its rank; 20 bytes, and between ranks that are not rank 0 the job's
//! token) and is welcomed or refused with a reason. Who says something else is refused, told why, and kept in the list that
//! stands in the error should a rank be missing at the end; the job goes on.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};

use super::error::Refused;

/// What a rank's first bytes are.
const MAGIC: [u8; 8] = *b"zerorank";
/// Raised when the messages change.
const PROTOCOL: u32 = 3;
/// Bytes of a hello without its token.
const HELLO: usize = 20;

/// What a rank of this job knows and a stranger does not.
pub(super) type Token = [u8; 16];

/// How long a connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long a connection may take to take a message before the run begins: what is sent then is small.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// How long what was sent may go without an answer of the other machine: longer than a machine that is moved, or a process that
/// is stopped for a moment with its buffers full, stays away.
#[cfg(target_os = "linux")]
const CUT_OFF_MS: libc::c_int = 60_000;

/// Who is expected at a door.
pub(super) struct Expected<'a> {
    /// The rank that listens.
    pub(super) at: usize,
    pub(super) world: usize,
    /// The ranks that are to come.
    pub(super) ranks: core::ops::Range<usize>,
    /// What they must know; nothing at rank 0's door.
    pub(super) token: Option<&'a Token>,
}

/// Takes the connections of those who are expected, until all have come or it is late; and those who were turned away.
pub(super) fn receive(
    listener: &TcpListener,
    expected: &Expected<'_>,
    until: Instant,
) -> (BTreeMap<usize, TcpStream>, Vec<Refused>) {
    let (mut joined, mut refused) = (BTreeMap::new(), Vec::new());
    let length = HELLO + expected.token.map_or(0, |token| token.len());
    std::thread::scope(|scope| {
        let (said, hellos) = unbounded();
        // Connections that have not said hello, by where they came from, to be cut off at the end.
        let mut silent = HashMap::new();
        while joined.len() < expected.ranks.len() && Instant::now() < until {
            match listener.accept() {
                Ok((stream, from)) => {
                    silent.extend(stream.try_clone().ok().map(|stream| (from, stream)));
                    let said = said.clone();
                    let greet = move || greet(stream, from, length, &said);
                    let name = format!("rank-{}-hello", expected.at);
                    // Without a thread the connection is dropped, and its rank tries again.
                    let _ = std::thread::Builder::new().name(name).spawn_scoped(scope, greet);
                }
                // Nobody has come, or who came has gone again.
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
            for Hello { stream, from, outcome } in hellos.try_iter() {
                silent.remove(&from);
                // One that has gone again, because it was welcomed late or has been started anew, has not come.
                joined.retain(|_, stream| !is_gone(stream));
                let taken = |rank: usize| joined.contains_key(&rank);
                match outcome.and_then(|bytes| judge(&bytes, expected, taken)) {
                    Ok(rank) => {
                        let left = until.saturating_duration_since(Instant::now());
                        joined.extend(welcome(stream, left).ok().map(|stream| (rank, stream)));
                    }
                    Err(reason) => {
                        tracing::warn!(%from, %reason, "a connection to rank {} was refused", expected.at);
                        refuse(stream, &reason);
                        refused.push(Refused { from: from.to_string(), reason });
                    }
                }
            }
        }
        for stream in silent.into_values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    });
    (joined, refused)
}

struct Hello {
    stream: TcpStream,
    from: SocketAddr,
    outcome: Result<Vec<u8>, String>,
}

/// Reads what a connection says of itself.
fn greet(mut stream: TcpStream, from: SocketAddr, length: usize, said: &Sender<Hello>) {
    let mut bytes = vec![0; length];
    let read = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO_LIMIT)))
        .and_then(|()| stream.read_exact(&mut bytes));
    let outcome = match read {
        Ok(()) if bytes.starts_with(&MAGIC) => Ok(bytes),
        Ok(()) => Err("it does not speak this protocol".to_string()),
        Err(error) => Err(format!("it did not say which rank it is: {error}")),
    };
    // The rendezvous may be over.
    let _ = said.send(Hello { stream, from, outcome });
}

/// The rank that a hello is of, if it is expected and has not come yet.
fn judge(hello: &[u8], expected: &Expected<'_>, taken: impl Fn(usize) -> bool) -> Result<usize, String> {
    let Expected { world, ranks, token, .. } = expected;
    let number = |at: usize| u32::from_le_bytes(hello[at..at + 4].try_into().expect("four bytes"));
    let (protocol, of, rank) = (number(8), number(12), number(16));
    let index = rank as usize;
    if protocol != PROTOCOL {
        return Err(format!(
            "it speaks version {protocol} of the protocol, rank 0 version {PROTOCOL}; run one program"
        ));
    }
    if of as usize != *world {
        return Err(format!("its WORLD_SIZE is {of}, rank 0's is {world}; give all ranks the same"));
    }
    if token.is_some_and(|token| hello[HELLO..] != token[..]) {
        return Err("it is not of this job".to_string());
    }
    if !ranks.contains(&index) {
        return Err(format!("its RANK is {rank}, expected one from {} to {}", ranks.start, ranks.end - 1));
    }
    if taken(index) {
        return Err(format!("its RANK is {rank}, and that rank has connected already; give each process its own"));
    }
    Ok(index)
}

/// Lets a rank in, and tells it how long the others are still waited for.
fn welcome(mut stream: TcpStream, left: Duration) -> std::io::Result<TcpStream> {
    settle(&stream)?;
    let left = u32::try_from(left.as_millis()).unwrap_or(u32::MAX);
    stream.write_all(&[0_u32.to_le_bytes(), left.to_le_bytes()].concat())?;
    Ok(stream)
}

/// Whether the other end of a connection has closed it. What it has sent stays to be read.
fn is_gone(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let restored = stream.set_nonblocking(false);
    restored.is_err() || !matches!(looked, Ok(1..)) && !looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn refuse(mut stream: TcpStream, reason: &str) {
    let mut bytes = (reason.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(reason.as_bytes());
    // It may have gone already.
    let _ = stream.set_write_timeout(Some(ATTEMPT)).and_then(|()| stream.write_all(&bytes));
    let _ = stream.shutdown(Shutdown::Both);
}

/// Why a door stayed closed.
pub(super) enum Turned {
    /// Whoever is there does not want this rank.
    Away(String),
    /// Nobody opened in time; what the last attempt ran into.
    Late(String),
}

/// Connects to a rank's door, and says hello, until it is late; gives the connection, and how long the rank there waits for
/// others. The name may not be known yet, and nobody may listen yet: both are tried again.
pub(super) fn knock(
    (host, port): (&str, u16),
    (rank, world): (usize, usize),
    token: Option<&Token>,
    until: Instant,
) -> Result<(TcpStream, Duration), Turned> {
    let mut pause = Duration::from_millis(20);
    loop {
        let last = match attempt(host, port).and_then(|stream| introduce(stream, rank, world, token)) {
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
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, format!("{host} has no address"));
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, ATTEMPT) {
            // A machine without a listener on a port of its own range can connect to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = std::io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Says hello; the inner error is the refusal.
fn introduce(
    mut stream: TcpStream,
    rank: usize,
    world: usize,
    token: Option<&Token>,
) -> std::io::Result<Result<(TcpStream, Duration), String>> {
    let mut hello = MAGIC.to_vec();
    for number in [PROTOCOL, world as u32, rank as u32] {
        hello.extend_from_slice(&number.to_le_bytes());
    }
    hello.extend(token.into_iter().flatten());
    settle(&stream)?;
    stream.write_all(&hello)?;
    stream.set_read_timeout(Some(HELLO_LIMIT + ATTEMPT))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    match u32::from_le_bytes(length) {
        0 => {
            let mut left = [0; 4];
            stream.read_exact(&mut left)?;
            stream.set_read_timeout(None)?;
            Ok(Ok((stream, Duration::from_millis(u32::from_le_bytes(left).into()))))
        }
        length @ 1..=4096 => {
            let mut reason = vec![0; length as usize];
            stream.read_exact(&mut reason)?;
            Ok(Err(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Ok(Err("what listens there is no rank of this program; MASTER_PORT must be free for it".into())),
    }
}

/// Listens at the address itself, or, where that is a name for rank 0's machine and not an address of it (a service of
/// Kubernetes), on all addresses. So too where a machine calls itself by the name and means its loopback, as Debian's do.
pub(super) fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let resolved: Vec<SocketAddr> = (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    let meant = host == "localhost" || host.parse::<IpAddr>().is_ok();
    let mut failed = None;
    for address in resolved.iter().filter(|address| meant || !address.ip().is_loopback()) {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => failed = Some(error),
            Err(_) => {}
        }
    }
    match failed {
        Some(error) => Err(error),
        None => bind_all(port),
    }
}

/// Listens on all addresses of this machine.
pub(super) fn bind_all(port: u16) -> std::io::Result<TcpListener> {
    let (all6, all4) = (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    TcpListener::bind((all6, port)).or_else(|_| TcpListener::bind((all4, port)))
}

/// Small messages go out at once, none is waited for without end, and a machine that is cut off is noticed.
fn settle(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))?;
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        #[cfg(target_os = "linux")]
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 10),
        #[cfg(target_os = "linux")]
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 5),
        #[cfg(target_os = "linux")]
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
        #[cfg(target_os = "linux")]
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, CUT_OFF_MS),
    ];
    for (level, name, value) in options {
        let value: libc::c_int = value;
        // SAFETY: the socket is open while the stream is borrowed, and the value is an int, as these options take. A
        // refusal leaves the system's own times.
        unsafe {
            libc::setsockopt(stream.as_raw_fd(), level, name, (&raw const value).cast(), size_of_val(&value) as u32);
        }
    }
    Ok(())
}
