//! How the ranks of a job find each other: rank 0 listens, the others connect and say who they are.
//!
//! A rank says hello (magic, protocol, number of ranks, its rank; 20 bytes) and is welcomed or refused with a reason. When
//! all have come, the listener closes and every rank is told to go. Who says something else is refused, told why, and kept
//! in the list that stands in the hub's error should a rank be missing at the end; the job goes on.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};

use super::super::launcher::{EnvironmentError, Rendezvous};

/// What a rank's first bytes are.
const MAGIC: [u8; 8] = *b"zerorank";
/// Raised when the messages change.
const PROTOCOL: u32 = 1;
const HELLO: usize = 20;

/// How long a connection may take to say who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long a connection may take to take a message: what is sent is small.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// A connection that was turned away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Where it came from.
    pub from: String,
    /// Why.
    pub reason: String,
}

impl core::fmt::Display for Refused {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} ({})", self.from, self.reason)
    }
}

/// The ranks did not find each other.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The environment does not say where.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// Rank 0 cannot listen.
    #[error(
        "rank 0 cannot listen at {host}:{port}: {source}; set MASTER_ADDR to rank 0's machine and MASTER_PORT to a port \
         that nothing else uses there"
    )]
    Listen {
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// The system's error.
        source: std::io::Error,
    },
    /// Ranks did not connect within the deadline.
    #[error(
        "rank 0 waited {waited_ms} ms at {host}:{port} for rank(s) {missing:?}, which did not connect{}: check that they \
         were started, and that their MASTER_ADDR and MASTER_PORT are these", refused_list(.refused)
    )]
    Missing {
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// Milliseconds waited.
        waited_ms: u64,
        /// The ranks.
        missing: Vec<usize>,
        /// Connections that were turned away meanwhile.
        refused: Vec<Refused>,
    },
    /// Rank 0 could not be reached within the deadline.
    #[error(
        "rank {rank} could not reach rank 0 at {host}:{port} within {waited_ms} ms ({last}): check that rank 0 was started, \
         that MASTER_ADDR is its machine, and that no firewall keeps MASTER_PORT closed"
    )]
    Unreachable {
        /// This rank.
        rank: usize,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// Milliseconds waited.
        waited_ms: u64,
        /// What the last attempt ran into.
        last: String,
    },
    /// Rank 0 turned this process away, or is no rank 0.
    #[error("rank {rank} was refused at {host}:{port}: {reason}")]
    Refused {
        /// This rank.
        rank: usize,
        /// The address.
        host: String,
        /// The port.
        port: u16,
        /// What it said.
        reason: String,
    },
    /// The operating system gave no thread.
    #[error("rank {rank} got no thread for its connections: {source}")]
    Thread {
        /// This rank.
        rank: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

fn refused_list(refused: &[Refused]) -> String {
    if refused.is_empty() {
        return String::new();
    }
    let list: Vec<String> = refused.iter().map(ToString::to_string).collect();
    format!("; turned away meanwhile: {}", list.join(", "))
}

/// On rank 0: the other ranks' connections, in the order of their ranks.
pub(super) fn listen(place: &Rendezvous, deadline: Duration) -> Result<Vec<TcpStream>, RendezvousError> {
    let Rendezvous { world, host, port, .. } = place;
    let begin = Instant::now();
    let failed = |source| RendezvousError::Listen { host: host.clone(), port: *port, source };
    let listener = bind(host, *port).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let mut joined: Vec<Option<TcpStream>> = (0..*world).map(|_| None).collect();
    let mut refused = Vec::new();
    std::thread::scope(|scope| {
        let (said, hellos) = unbounded();
        // Connections that have not said hello, to be cut off at the end.
        let mut silent = Vec::new();
        let complete = |joined: &[Option<TcpStream>]| joined.iter().skip(1).all(Option::is_some);
        while !complete(&joined) && begin.elapsed() < deadline {
            match listener.accept() {
                Ok((stream, from)) => {
                    silent.extend(stream.try_clone());
                    let said = said.clone();
                    let greet = move || greet(stream, from, &said);
                    // Without a thread the connection is dropped, and its rank tries again.
                    let _ = std::thread::Builder::new().name("rank-0-tcp-hello".into()).spawn_scoped(scope, greet);
                }
                // Nobody has come, or who came has gone again.
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
            for Hello { stream, from, outcome } in hellos.try_iter() {
                let taken = |rank: usize| joined[rank].is_some();
                match outcome.and_then(|(protocol, of, rank)| judge((protocol, of, rank), *world, taken)) {
                    Ok(rank) => joined[rank] = welcome(stream).ok(),
                    Err(reason) => {
                        tracing::warn!(%from, %reason, "a connection to rank 0 was refused");
                        refuse(stream, &reason);
                        refused.push(Refused { from: from.to_string(), reason });
                    }
                }
            }
        }
        for stream in silent {
            if !joined.iter().flatten().any(|kept| kept.peer_addr().ok() == stream.peer_addr().ok()) {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    });
    let missing: Vec<usize> = (1..*world).filter(|&rank| joined[rank].is_none()).collect();
    if missing.is_empty() {
        return Ok(joined.into_iter().flatten().collect());
    }
    let waited_ms = begin.elapsed().as_millis() as u64;
    for stream in joined.into_iter().flatten() {
        // They have been welcomed: what comes next is the end.
        let _ = stream.shutdown(Shutdown::Both);
    }
    Err(RendezvousError::Missing { host: host.clone(), port: *port, waited_ms, missing, refused })
}

struct Hello {
    stream: TcpStream,
    from: SocketAddr,
    outcome: Result<(u32, u32, u32), String>,
}

/// Reads what a connection says of itself.
fn greet(mut stream: TcpStream, from: SocketAddr, said: &Sender<Hello>) {
    let mut bytes = [0; HELLO];
    let read = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(HELLO_LIMIT)))
        .and_then(|()| stream.read_exact(&mut bytes));
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let outcome = match read {
        Ok(()) if bytes[..8] == MAGIC => Ok((number(8), number(12), number(16))),
        Ok(()) => Err("it does not speak this protocol".to_string()),
        Err(error) => Err(format!("it did not say which rank it is: {error}")),
    };
    // The rendezvous may be over.
    let _ = said.send(Hello { stream, from, outcome });
}

/// The rank that a hello is of, if this job has it and it has not come yet.
fn judge((protocol, of, rank): (u32, u32, u32), world: usize, taken: impl Fn(usize) -> bool) -> Result<usize, String> {
    let index = rank as usize;
    if protocol != PROTOCOL {
        return Err(format!(
            "it speaks version {protocol} of the protocol, rank 0 version {PROTOCOL}; run one program"
        ));
    }
    if of as usize != world {
        return Err(format!("its WORLD_SIZE is {of}, rank 0's is {world}; give all ranks the same"));
    }
    if index == 0 || index >= world {
        return Err(format!("its RANK is {rank}, expected one from 1 to {}", world - 1));
    }
    if taken(index) {
        return Err(format!("its RANK is {rank}, and that rank has connected already; give each process its own"));
    }
    Ok(index)
}

fn welcome(mut stream: TcpStream) -> std::io::Result<TcpStream> {
    settle(&stream)?;
    stream.write_all(&0_u32.to_le_bytes())?;
    Ok(stream)
}

fn refuse(mut stream: TcpStream, reason: &str) {
    let mut bytes = (reason.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(reason.as_bytes());
    // It may have gone already.
    let _ = stream.set_write_timeout(Some(ATTEMPT)).and_then(|()| stream.write_all(&bytes));
    let _ = stream.shutdown(Shutdown::Both);
}

/// On another rank: the connection to rank 0.
pub(super) fn join(place: &Rendezvous, deadline: Duration) -> Result<TcpStream, RendezvousError> {
    let Rendezvous { rank, world, host, port, .. } = place;
    let begin = Instant::now();
    let mut pause = Duration::from_millis(20);
    loop {
        let last = match attempt(host, *port).and_then(|stream| introduce(stream, *rank, *world)) {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(reason)) => {
                return Err(RendezvousError::Refused { rank: *rank, host: host.clone(), port: *port, reason });
            }
            Err(error) => error.to_string(),
        };
        let waited = begin.elapsed();
        if waited >= deadline {
            let (host, waited_ms) = (host.clone(), waited.as_millis() as u64);
            return Err(RendezvousError::Unreachable { rank: *rank, host, port: *port, waited_ms, last });
        }
        std::thread::sleep(pause.min(deadline - waited));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// The name may not be known yet, and rank 0 may not listen yet: both are tried again.
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

/// Says hello; the inner error is rank 0's refusal.
fn introduce(mut stream: TcpStream, rank: usize, world: usize) -> std::io::Result<Result<TcpStream, String>> {
    let mut hello = MAGIC.to_vec();
    for number in [PROTOCOL, world as u32, rank as u32] {
        hello.extend_from_slice(&number.to_le_bytes());
    }
    settle(&stream)?;
    stream.write_all(&hello)?;
    stream.set_read_timeout(Some(HELLO_LIMIT + ATTEMPT))?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    stream.set_read_timeout(None)?;
    match u32::from_le_bytes(length) {
        0 => Ok(Ok(stream)),
        length @ 1..=4096 => {
            let mut reason = vec![0; length as usize];
            stream.read_exact(&mut reason)?;
            Ok(Err(String::from_utf8_lossy(&reason).into_owned()))
        }
        _ => Ok(Err("what listens there is no rank of this program; MASTER_PORT must be free for it".into())),
    }
}

/// Listens at the address itself, or, where that is a name for rank 0's machine and not an address of it (a service of
/// Kubernetes), on all addresses.
fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let resolved: Vec<SocketAddr> = (host, port).to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    let mut failed = None;
    for address in &resolved {
        match TcpListener::bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => failed = Some(error),
            Err(_) => {}
        }
    }
    if let Some(error) = failed {
        return Err(error);
    }
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
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 25_000),
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
