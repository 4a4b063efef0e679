//! The first words on a connection: who connects, and whether it is wanted.
//!
//! 1. A rank says hello: magic, protocol, number of ranks, its rank, whether it has a secret, its job, and a random number.
//! 2. The door answers with a random number of its own.
//! 3. The rank proves that it knows the job's key, by a code (HMAC with SHA-256) over all that was said; the door proves it in
//!    turn, and lets the rank in.
//! 4. The rank says that it has heard so. Only then it counts: one that gave up meanwhile will come again.
//!
//! The key is the job's secret, and at the doors of ranks that are not rank 0 a token besides, which rank 0 tells those who have
//! come so far. Without a secret the code proves only that a rank speaks for this job's id. Who says something else is told why,
//! and counted in the list that stands in the error should a rank be missing at the end; the job goes on.
//!
//! Strangers are kept in bounds: so many at a time may not have said yet who they are, for so long in all, in so few bytes. One
//! thread looks at all of them; none can hold up another.

use std::collections::BTreeMap;
use std::io::{Error, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use super::super::super::launcher::{Rendezvous, random};
use super::error::Refused;

/// What a rank's first bytes are.
const MAGIC: [u8; 8] = *b"zerorank";
/// Raised when the messages change.
const PROTOCOL: u32 = 4;
/// Bytes until the protocol is known.
const HEAD: usize = 12;
/// Bytes of a job's id.
const JOB: usize = 64;
/// Bytes of a random number, and of a code.
const CODE: usize = 32;
/// Bytes of a hello.
const HELLO: usize = HEAD + 9 + JOB + CODE;
/// Longest reason of a refusal.
const REASON: usize = 4096;

/// What the ranks of a job know that rank 0 has let in.
pub(super) type Token = [u8; CODE];

/// How long a connection may take to say, in all, who it is.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// How long one attempt to connect may take.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How long a connection may take to take a message before the run begins: what is sent then is small.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// Most connections at a time that have not said who they are. When more come, the oldest has to go, if it has had this long.
const GUESTS: usize = 256;
const FAIR: Duration = Duration::from_millis(200);
/// How long a door goes on without a descriptor for those who knock.
const STARVED: Duration = Duration::from_secs(5);

/// How long what was sent may go without an answer of the other machine: longer than a machine that is moved, or a process that
/// is stopped for a moment with its buffers full, stays away.
#[cfg(target_os = "linux")]
const CUT_OFF_MS: libc::c_int = 60_000;

/// What a rank knows of its job, and a stranger does not.
pub(super) struct Key {
    job: [u8; JOB],
    has_secret: bool,
    bytes: Vec<u8>,
}

impl Key {
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
    fn code(&self, role: &str, at: usize, hello: &[u8], number: &[u8]) -> Hmac<Sha256> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.bytes).expect("a key may have any length");
        for part in [role.as_bytes(), &(at as u64).to_le_bytes(), hello, number] {
            code.update(part);
        }
        code
    }
}

/// Who is expected at a door.
pub(super) struct Expected<'a> {
    /// The rank that listens.
    pub(super) at: usize,
    pub(super) world: usize,
    /// The ranks that are to come.
    pub(super) ranks: core::ops::Range<usize>,
    pub(super) key: &'a Key,
}

/// Who was turned away: each reason once, with how many had it.
#[derive(Default)]
struct Tally(Vec<Refused>);

impl Tally {
    /// Reasons that are told apart; a stranger may make up many.
    const REASONS: usize = 16;

    fn add(&mut self, from: impl ToString, reason: &str) {
        let reason = match self.0.iter().any(|refused| refused.reason == reason) {
            false if self.0.len() >= Self::REASONS => "other reasons",
            _ => reason,
        };
        match self.0.iter_mut().find(|refused| refused.reason == reason) {
            Some(refused) => refused.count += 1,
            None => self.0.push(Refused { from: from.to_string(), reason: reason.to_string(), count: 1 }),
        }
    }
}

/// How far a connection has come.
enum Step {
    Hello,
    /// It was given this number, to prove that it is this rank.
    Proof(usize, [u8; CODE]),
    /// It was let in as this rank, and is to say that it has heard so.
    Heard(usize),
}

/// A connection that is not one of a rank yet. It does not block.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    since: Instant,
    said: Vec<u8>,
    step: Step,
}

/// Takes the connections of those who are expected, until all have come or it is late; and those who were turned away.
///
/// # Errors
///
/// The system's, when it gives no descriptors for connections.
pub(super) fn receive(
    listener: &TcpListener,
    expected: &Expected<'_>,
    until: Instant,
) -> std::io::Result<(BTreeMap<usize, TcpStream>, Vec<Refused>)> {
    let (mut joined, mut refused) = (BTreeMap::new(), Tally::default());
    let mut guests: Vec<Guest> = Vec::new();
    let mut starved: Option<Instant> = None;
    while Instant::now() < until {
        if joined.len() == expected.ranks.len() {
            // One that has gone again has not come.
            joined.retain(|_, stream| !is_gone(stream));
            if joined.len() == expected.ranks.len() {
                break;
            }
        }
        let mut is_idle = true;
        for _ in 0..GUESTS {
            if guests.len() >= GUESTS {
                let Some(at) = oldest(&guests, FAIR) else { break };
                refused.add(guests.remove(at).from, "it had not said which rank it is, and others came");
            }
            match listener.accept() {
                Ok((stream, from)) => {
                    (is_idle, starved) = (false, None);
                    // Without that it would hold up the others.
                    if stream.set_nonblocking(true).is_ok() {
                        guests.push(Guest { stream, from, since: Instant::now(), said: Vec::new(), step: Step::Hello });
                    }
                }
                Err(error) if is_short(&error) => {
                    if starved.get_or_insert_with(Instant::now).elapsed() > STARVED {
                        return Err(error);
                    }
                    if let Some(at) = oldest(&guests, Duration::ZERO) {
                        refused.add(guests.remove(at).from, &format!("no room for it: {error}; see ulimit -n"));
                    }
                    break;
                }
                // Nobody has come, or who came has gone again.
                Err(_) => break,
            }
        }
        let mut at = 0;
        while at < guests.len() {
            let welcomed: Vec<usize> = guests.iter().filter_map(Guest::welcomed).collect();
            let is_held = |rank: usize| welcomed.contains(&rank);
            match guests[at].turn(expected, until, &mut joined, is_held) {
                Ok(None) => at += 1,
                Ok(Some(rank)) => {
                    is_idle = false;
                    let Guest { stream, .. } = guests.swap_remove(at);
                    joined.extend(settle(&stream).ok().map(|()| (rank, stream)));
                }
                Err(reason) => {
                    is_idle = false;
                    let guest = guests.swap_remove(at);
                    guest.refuse(&reason);
                    refused.add(guest.from, &reason);
                }
            }
        }
        if is_idle {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    for guest in guests {
        refused.add(guest.from, "it had not said which rank it is when the others had");
    }
    for Refused { from, reason, count } in &refused.0 {
        tracing::warn!(%from, %reason, count, "connections to rank {} were refused", expected.at);
    }
    Ok((joined, refused.0))
}

/// The place of the one that has waited longest, if that is longer than `than`; none that was let in.
fn oldest(guests: &[Guest], than: Duration) -> Option<usize> {
    let waiting = guests.iter().enumerate().filter(|(_, guest)| guest.welcomed().is_none());
    let (at, guest) = waiting.min_by_key(|(_, guest)| guest.since)?;
    (guest.since.elapsed() >= than).then_some(at)
}

/// Whether the system lacks what a connection takes: somebody has come, and waits.
fn is_short(error: &Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

impl Guest {
    /// The rank that it was let in as.
    fn welcomed(&self) -> Option<usize> {
        match self.step {
            Step::Heard(rank) => Some(rank),
            Step::Hello | Step::Proof(..) => None,
        }
    }

    /// Goes on with what has come: the rank, once it is in, or why it is refused.
    fn turn(
        &mut self,
        expected: &Expected<'_>,
        until: Instant,
        joined: &mut BTreeMap<usize, TcpStream>,
        is_held: impl Fn(usize) -> bool,
    ) -> Result<Option<usize>, String> {
        if self.since.elapsed() > HELLO_LIMIT {
            return Err(format!("it did not say which rank it is within {} s", HELLO_LIMIT.as_secs()));
        }
        if matches!(self.step, Step::Hello) {
            if !self.has(HEAD)? {
                return Ok(None);
            }
            let protocol = number(&self.said, 8);
            if protocol != PROTOCOL {
                return Err(format!(
                    "it speaks version {protocol} of the protocol, rank 0 version {PROTOCOL}; run one program"
                ));
            }
            if !self.has(HELLO)? {
                return Ok(None);
            }
            let rank = judge(&self.said, expected)?;
            let number = random().map_err(|error| format!("the system gives no random numbers: {error}"))?;
            self.say(&[&0_u32.to_le_bytes(), &number])?;
            self.step = Step::Proof(rank, number);
        }
        if let Step::Proof(rank, number) = self.step {
            if !self.has(HELLO + CODE)? {
                return Ok(None);
            }
            let (hello, code) = self.said.split_at(HELLO);
            let right = expected.key.code("rank", expected.at, hello, &number);
            // In constant time.
            if right.verify_slice(code).is_err() {
                return Err(match (expected.key.has_secret, expected.at) {
                    (true, 0) => "it does not know this job's secret; give all ranks the same ZERO_SECRET".to_string(),
                    _ => "it is not of this job".to_string(),
                });
            }
            // Another process of this rank is being let in: whether it stays will be seen.
            if is_held(rank) {
                return Ok(None);
            }
            if joined.get(&rank).is_some_and(|stream| !is_gone(stream)) {
                return Err(format!(
                    "its RANK is {rank}, and that rank has connected already; give each process its own"
                ));
            }
            let left = until.saturating_duration_since(Instant::now()).as_millis();
            let left = u32::try_from(left).unwrap_or(u32::MAX);
            let proof = expected.key.code("door", expected.at, hello, &number).finalize().into_bytes();
            self.say(&[&0_u32.to_le_bytes(), &left.to_le_bytes(), &proof])?;
            self.step = Step::Heard(rank);
        }
        let Step::Heard(rank) = self.step else {
            unreachable!("a guest that has said hello has been asked for a proof")
        };
        Ok(self.has(HELLO + CODE + 1)?.then_some(rank))
    }

    /// Whether it has said `length` bytes by now; no more are read.
    fn has(&mut self, length: usize) -> Result<bool, String> {
        while self.said.len() < length {
            let mut room = [0; HELLO + CODE + 1];
            let ended = |why: String| Err(format!("it did not say which rank it is: {why}"));
            match self.stream.read(&mut room[..length - self.said.len()]) {
                Ok(0) => return ended("its connection ended".into()),
                Ok(more) => self.said.extend_from_slice(&room[..more]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return ended(error.to_string()),
            }
        }
        let magic = self.said.len().min(MAGIC.len());
        if self.said[..magic] != MAGIC[..magic] {
            return Err("it does not speak this protocol".into());
        }
        Ok(self.said.len() >= length)
    }

    /// What is said here fits the buffer of a connection to which little else was said.
    fn say(&self, parts: &[&[u8]]) -> Result<(), String> {
        let bytes = parts.concat();
        match (&self.stream).write(&bytes) {
            Ok(all) if all == bytes.len() => Ok(()),
            Ok(_) => Err("it takes no answer".into()),
            Err(error) => Err(format!("it takes no answer: {error}")),
        }
    }

    fn refuse(&self, reason: &str) {
        // It may have gone already. What it has said besides is read first: an end with unread bytes may overtake the reason.
        let _ = (&self.stream).read(&mut [0; REASON]);
        let _ = self.say(&[&(reason.len() as u32).to_le_bytes(), reason.as_bytes()]);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The rank that a hello is of, if it is expected.
fn judge(hello: &[u8], expected: &Expected<'_>) -> Result<usize, String> {
    let Expected { world, ranks, key, .. } = expected;
    let (of, rank, has_secret) = (number(hello, HEAD), number(hello, HEAD + 4), hello[HEAD + 8] != 0);
    let job = &hello[HEAD + 9..][..JOB];
    if of as usize != *world {
        return Err(format!("its WORLD_SIZE is {of}, rank 0's is {world}; give all ranks the same"));
    }
    if job != key.job {
        let name = |job: &[u8]| String::from_utf8_lossy(job).trim_end_matches('\0').escape_debug().to_string();
        return Err(format!("it is of another job, '{}', and not of '{}'", name(job), name(&key.job)));
    }
    match (has_secret, key.has_secret) {
        (false, true) => return Err("it has no ZERO_SECRET, and rank 0 has one; give all ranks the same".into()),
        (true, false) => return Err("it has a ZERO_SECRET, and rank 0 has none; give all ranks the same".into()),
        _ => {}
    }
    match ranks.contains(&(rank as usize)) {
        true => Ok(rank as usize),
        false => Err(format!("its RANK is {rank}, expected one from {} to {}", ranks.start, ranks.end - 1)),
    }
}

/// Whether the other end of a connection has closed it. What it has sent stays to be read.
fn is_gone(stream: &TcpStream) -> bool {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let restored = stream.set_nonblocking(false);
    restored.is_err() || !matches!(looked, Ok(1..)) && !looked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
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
    key: &Key,
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
    key: &Key,
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
    stream.write_all(&hello)?;
    if let Err(refusal) = answer(&mut stream, end)? {
        return Ok(Err(refusal));
    }
    let mut number = [0; CODE];
    read_all(&mut stream, &mut number, end)?;
    stream.write_all(&key.code("rank", at, &hello, &number).finalize().into_bytes())?;
    if let Err(refusal) = answer(&mut stream, end)? {
        return Ok(Err(refusal));
    }
    let mut welcome = [0; 4 + CODE];
    read_all(&mut stream, &mut welcome, end)?;
    if key.code("door", at, &hello, &number).verify_slice(&welcome[4..]).is_err() {
        return Ok(Err("what listens there does not know this job's secret".into()));
    }
    stream.write_all(&[1])?;
    stream.set_read_timeout(None)?;
    Ok(Ok((stream, Duration::from_millis(u32::from_le_bytes([welcome[0], welcome[1], welcome[2], welcome[3]]).into()))))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A listener that was held up finds the connection of a rank that has given up meanwhile, and will come again.
    #[test]
    fn a_connection_that_has_gone_is_not_taken_for_its_rank() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = Key::of(&Rendezvous::default());
        let mut stale = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut hello = MAGIC.to_vec();
        for number in [PROTOCOL, 2, 1] {
            hello.extend_from_slice(&number.to_le_bytes());
        }
        hello.resize(HELLO, 0);
        stale.write_all(&hello).unwrap();
        drop(stale);
        let until = Instant::now() + Duration::from_secs(5);
        std::thread::scope(|scope| {
            let live = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(300));
                knock(("127.0.0.1", port), 0, (1, 2), &key, until).unwrap().0
            });
            let (joined, refused) =
                receive(&listener, &Expected { at: 0, world: 2, ranks: 1..2, key: &key }, until).unwrap();
            let live = live.join().unwrap();
            assert_eq!(joined[&1].peer_addr().unwrap(), live.local_addr().unwrap());
            assert!(refused.len() == 1 && refused[0].reason.contains("did not say which rank it is"), "{refused:?}");
        });
    }

    /// One that came and has gone before the last came has not come.
    #[test]
    fn all_are_there_when_the_door_closes() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = Key::of(&Rendezvous::default());
        let until = Instant::now() + Duration::from_secs(5);
        let come = |rank| knock(("127.0.0.1", port), 0, (rank, 3), &key, until).unwrap().0;
        std::thread::scope(|scope| {
            let ranks = scope.spawn(|| {
                drop(come(1));
                let two = come(2);
                std::thread::sleep(Duration::from_millis(200));
                (come(1), two)
            });
            let (joined, _) = receive(&listener, &Expected { at: 0, world: 3, ranks: 1..3, key: &key }, until).unwrap();
            let (one, two) = ranks.join().unwrap();
            for (rank, stream) in [(1, one), (2, two)] {
                assert_eq!(joined[&rank].peer_addr().unwrap(), stream.local_addr().unwrap());
            }
        });
    }

    /// One byte now and then does not keep a connection.
    #[test]
    fn a_hello_has_one_deadline() {
        let listener = bind("127.0.0.1", 0).unwrap();
        let port = listener.local_addr().unwrap().port();
        listener.set_nonblocking(true).unwrap();
        let key = Key::of(&Rendezvous::default());
        let until = Instant::now() + Duration::from_secs(8);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
                for byte in MAGIC.into_iter().chain([0; HELLO]) {
                    std::thread::sleep(Duration::from_millis(900));
                    // Two writes after its end the system says so.
                    if stream.write_all(&[byte]).is_err() {
                        return;
                    }
                }
            });
            let (_, refused) =
                receive(&listener, &Expected { at: 0, world: 2, ranks: 1..2, key: &key }, until).unwrap();
            assert!(refused[0].reason.contains("within 5 s"), "{refused:?}");
        });
    }
}
